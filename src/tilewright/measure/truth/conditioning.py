"""How far rounding alone moves the results of a graph: runs of it in which every operator is off a little.

The contract bounds an error by eager's, and so presumes that this is the error of a correct implementation. Where
values cancel it is a matter of luck, and a float64 result is its own truth. A result that misses its bound is judged
again with the largest error of eager and of these runs: each is one that another correct implementation might give.

    1 - x.var(0)                    eager may be near by chance
    F.layer_norm(x) of two elements nearly all of the gradient cancels
    x.exp().double()                an error of fp32 in a result of float64
    autocast: dw = (x.T @ g).float()    an error of bf16 in a gradient of fp32

In a run, each input and each result of an operator is off by up to one unit of the last place of its dtype. Inputs of
16 bits stay as they are: every implementation reads them exactly. What rounding could tip over (integers, bools,
jumps) stays as eager decided it, and draws are eager's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx
from torch.utils._pytree import tree_map

from tilewright.measure.truth.reference import JUMPS, copies, whole_storage

DRAWS = 6
"""Most runs beside eager's."""
FINE = 3
"""The first of them, in which operators of 16 bits are exactly eager's: a result of 16 bits is judged by these alone,
since kernels may keep such values wider, never narrower."""
EXACT = frozenset(
    {"neg", "abs", "relu", "maximum", "minimum", "amax", "amin", "max", "min", "where", "masked_fill", "clone", "clamp"}
    | {"clamp_min", "clamp_max", "threshold_backward", "full", "full_like", "zeros", "zeros_like", "new_zeros", "ones"}
    | {"ones_like", "scalar_tensor", "empty_like", "view", "_unsafe_view", "reshape", "expand", "permute", "transpose"}
    | {"t", "unsqueeze", "squeeze", "slice", "select", "flip", "cat", "detach", "alias", "_to_copy", "native_dropout"}
    | {"copy", "zero", "fill"}
)
"""Operators that round nothing, or as every implementation does; also those that write in place."""
DECIDED = JUMPS | {"bernoulli"}
"""Floating results that a rounding error in an operand could tip over."""


def other_results(
    graph: fx.GraphModule, inputs: Sequence[torch.Tensor], seed: int
) -> Iterator[list[list[torch.Tensor]]]:
    """For each result of `graph` those that may stand beside eager's, of runs on copies of `inputs`: after each run
    those so far.

    Of all runs, where the dtype of the result is finer than one on the way to it. Generators are seeded as for eager.
    """
    (nodes,) = graph.graph.output_node().args
    assert isinstance(nodes, (list, tuple))
    counts = [DRAWS if _is_finer_than_operands(node) else FINE for node in nodes]
    eager, runs = Decisions(graph), list[list[Any]]()
    for draw in range(max(counts, default=0)):
        with torch.no_grad():
            if draw == 0:
                run(eager, copies(inputs), seed)
            other = Rounded(graph, eager.decided, draw, coarse=draw >= FINE)
            runs.append(run(other, other.near(copies(inputs)), seed))
        yield [[results[number] for results in runs[:count]] for number, count in enumerate(counts)]


def _is_finer_than_operands(result: object) -> bool:
    if not isinstance(result, fx.Node) or not is_inexact(own := result.meta.get("val")):
        return False
    values = [n.meta.get("val") for n in behind(result)]
    return any(torch.finfo(v.dtype).eps > torch.finfo(own.dtype).eps for v in values if is_inexact(v))


def behind(result: fx.Node) -> set[fx.Node]:
    """`result` and all that it is computed from."""
    seen, todo = {result}, [result]
    while todo:
        fresh = [x for x in todo.pop().all_input_nodes if x not in seen]
        seen.update(fresh)
        todo += fresh
    return seen


def run(interpreter: fx.Interpreter, inputs: Sequence[torch.Tensor], seed: int) -> list[Any]:
    torch.manual_seed(seed)
    results: list[Any] = interpreter.run(*inputs)
    return results


class Decisions(fx.Interpreter):
    """Keeps what rounding could tip over: integers, bools, the results of jumps and of draws by probabilities."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.decided: dict[fx.Node, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        tips = isinstance(result, torch.Tensor) and (not is_inexact(result) or operator_name(n.target) in DECIDED)
        if tips and n.op == "call_function":
            self.decided[n] = result.clone()
        return result


class Rounded(fx.Interpreter):
    """Has every operator in fp32 and float64, and in 16 bits if `coarse`, off by up to one unit of the last place.

    What eager decided stays as it was; `tipped` are the nodes where it would not have.
    """

    def __init__(
        self, module: fx.GraphModule, decided: dict[fx.Node, torch.Tensor], seed: int, *, coarse: bool
    ) -> None:
        super().__init__(module)
        self.decided = decided
        self.coarse = coarse
        self.seed = seed
        self.tipped: set[fx.Node] = set()
        self.generators: dict[torch.device, torch.Generator] = {}

    def near(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The inputs, those of fp32 and float64 moved by up to one unit of the last place, in place."""
        moved = set()
        for tensor in inputs:
            key = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None
            if key is not None and key not in moved and is_inexact(tensor) and not _is_narrow(tensor.dtype):
                whole = whole_storage(tensor)
                whole.copy_(self._off(whole))
                moved.add(key)
        return inputs

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = operator_name(target)
        result = super().call_function(target, args, kwargs)
        is_random = torch.Tag.nondeterministic_seeded in getattr(target, "tags", (torch.Tag.nondeterministic_seeded,))
        if not name or name.rstrip("_") in EXACT or is_random:
            return result
        if not target._schema.is_mutable:
            return tree_map(self._rounded, result)
        for number, argument in enumerate(target._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[number] if number < len(args) else kwargs.get(argument.name)
                tree_map(lambda t: t.copy_(self._rounded(t)) if is_inexact(t) else t, written)
        return result

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n not in self.decided:
            return result
        if not torch.equal(result, self.decided[n]) and not result.isnan().any():
            self.tipped.add(n)
        return self.decided[n].clone()

    def _rounded(self, value: Any) -> Any:
        # What is traced may ask tensors without values for a dtype.
        if not is_inexact(value) or value.is_meta or (_is_narrow(value.dtype) and not self.coarse):
            return value
        return self._off(value)

    def _off(self, value: torch.Tensor) -> torch.Tensor:
        if value.is_complex():
            parts = self._off(torch.view_as_real(value.resolve_conj()))
            return torch.view_as_complex(parts.contiguous())
        generator = self.generators.get(value.device)
        if generator is None:
            generator = self.generators[value.device] = torch.Generator(value.device).manual_seed(self.seed)
        off = 2 * torch.rand(value.shape, generator=generator, dtype=torch.float64, device=value.device) - 1
        wide = value.double()
        moved = wide * (1 + off * torch.finfo(value.dtype).eps)
        # One unit above 1 is no probability and no cosine: what lies between -1 and 1 stays there.
        return torch.where(wide.abs() <= 1, moved.clamp(-1, 1), moved).to(value.dtype)


def _is_narrow(dtype: torch.dtype) -> bool:
    return torch.finfo(dtype).eps > torch.finfo(torch.float32).eps


def is_inexact(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def operator_name(target: Any) -> str:
    return str(target._schema.name.removeprefix("aten::")) if isinstance(target, torch._ops.OpOverload) else ""
