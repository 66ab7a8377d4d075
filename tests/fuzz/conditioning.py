"""Which programs the contract can judge.

It bounds a result by eager's error, and so presumes that this is the error of a correct implementation. Where
values cancel that is a matter of luck, in two ways that eager and float64 alone tell. A result that misses the bound
counts unless they tell so; no result of a compiled program has a say in it.

    F.layer_norm(x) of two elements     nearly all of the gradient cancels: eager is many units of the last
                                        place from the truth, with what noise its last steps left
    1 - x.var(0)                        eager is near by chance: were each of its operators off by one unit
                                        of the last place, it would miss the bound itself
    x > x.sum()                         one unit more or less in the sum tips a comparison over
    F.layer_norm(x[:, :1], (1,)).any()  as does an operator that rounds its result alone: of one element it gives 0
    ((x * 0.3).sin() @ y).argmax(0)     in 16 bits: what a product reads is rounded as eager rounds it, or wider; the
                                        contract has eager's rounding back to the last product only
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from tests.fuzz.graphs import is_inexact
from tilewright.measure.truth.contract import compare
from tilewright.measure.truth.reference import JUMPS, Pair, reference_run
from tilewright.measure.truth.verify import JointGraph, joint_graph, named_tensors, random_tangents

MOST_ULPS = 16.0
"""The relative error that eager may have, in units of the coarsest dtype on the way to the result."""
DRAWS = 6
"""Other implementations, of which the last `COARSE` are off in 16-bit operators too."""
COARSE = 3
EXACT = frozenset(
    {"neg", "abs", "relu", "maximum", "minimum", "amax", "amin", "max", "min", "where", "masked_fill", "clone", "clamp"}
    | {"clamp_min", "clamp_max", "threshold_backward", "full", "full_like", "zeros", "zeros_like", "new_zeros", "ones"}
    | {"ones_like", "scalar_tensor", "empty_like", "view", "_unsafe_view", "reshape", "expand", "permute", "transpose"}
    | {"t", "unsqueeze", "squeeze", "slice", "select", "flip", "cat", "detach", "alias", "_to_copy", "native_dropout"}
)
"""Operators that round nothing, or as every implementation does."""
DECIDED = JUMPS | {"bernoulli"}
"""Floating results that a rounding error in an operand could tip over."""
PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward"})


def unverified(function: Callable[..., Any], inputs: Sequence[torch.Tensor], seed: int, training: bool) -> list[str]:
    """The results of `function` and, with `training`, gradients that the contract cannot judge.

    Named as `verify` names them, which runs with the same seed on the same values.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        outputs = [tensor for _, tensor in named_tensors(function(*inputs), "output")]
        tangents = random_tangents([t for t in outputs if t.requires_grad] if training else [], seed)
        joint = joint_graph(function, inputs, tangents, seed=seed, training=training)
        torch.manual_seed(seed)
        pairs = reference_run(joint.graph, joint.inputs)
        others = _Others(joint, seed)
    nodes = joint.graph.graph.output_node().args[0]
    assert isinstance(nodes, (list, tuple))
    return [
        name
        for number, (name, node, pair) in enumerate(zip(joint.names, nodes, pairs, strict=True))
        if isinstance(node, fx.Node) and not _is_judged(node, pair, others, number)
    ]


def _is_judged(node: fx.Node, pair: Pair, others: _Others, number: int) -> bool:
    behind = _behind(node)
    if behind & others.tipped:
        return False
    if not is_inexact(pair.eager):
        return True
    values = (n.meta.get("val") for n in behind)
    dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor) and is_inexact(v)}
    coarsest, own = max(torch.finfo(dtype).eps for dtype in dtypes), torch.finfo(pair.eager.dtype).eps
    if compare(pair.eager, pair.eager, pair.truth).error > MOST_ULPS * coarsest:
        return False
    # Kernels may keep 16-bit values wider than eager; only of a 16-bit result the bound allows for that.
    drawn = others.results if own < coarsest else others.results[: DRAWS - COARSE]
    return all(compare(result[number], pair.eager, pair.truth).ok for result in drawn)


def _behind(result: fx.Node) -> set[fx.Node]:
    """`result` and all that it is computed from."""
    seen, todo = {result}, [result]
    while todo:
        fresh = [x for x in todo.pop().all_input_nodes if x not in seen]
        seen.update(fresh)
        todo += fresh
    return seen


class _Others:
    """The results of other implementations, all of them correct, and the decisions that one of them tipped over."""

    def __init__(self, joint: JointGraph, seed: int) -> None:
        eager = _Eager(joint.graph)
        _run(eager, joint, seed)
        self.results: list[list[torch.Tensor]] = []
        self.tipped: set[fx.Node] = set()
        for draw in range(DRAWS):
            other = _Rounded(joint.graph, eager.decided, draw, coarse=draw >= DRAWS - COARSE)
            self.results.append(_run(other, joint, seed))
            if not other.coarse:
                self.tipped |= other.tipped
        exact = _Exact(joint.graph, eager.decided, DRAWS, coarse=False)
        _run(exact, joint, seed)
        self.tipped |= exact.tipped | _beyond_wide_products(joint.graph.graph) & eager.decided.keys()


def _beyond_wide_products(graph: fx.Graph) -> set[fx.Node]:
    """What depends on a product of 16-bit values that other operators rounded."""
    rounded, beyond = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        if any(x in beyond or (x in rounded and _name(node.target) in PRODUCTS) for x in node.all_input_nodes):
            beyond.add(node)
        value = node.meta.get("val")
        narrow = isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize == 2
        rounds = node.op == "call_function" and _name(node.target) not in EXACT | PRODUCTS
        if narrow and (rounds or any(x in rounded for x in node.all_input_nodes)):
            rounded.add(node)
    return beyond


def _run(interpreter: fx.Interpreter, joint: JointGraph, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    results: list[torch.Tensor] = interpreter.run(*(t.clone() for t in joint.inputs))
    return results


class _Eager(fx.Interpreter):
    """Keeps what rounding could tip over: integers, bools, the results of jumps and of draws by probabilities."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.decided: dict[fx.Node, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        tips = isinstance(result, torch.Tensor) and (not is_inexact(result) or _name(n.target) in DECIDED)
        if tips and n.op == "call_function":
            self.decided[n] = result.clone()
        return result


class _Rounded(fx.Interpreter):
    """Has every operator in fp32, and in 16 bits if `coarse`, off by up to one unit of the last place.

    What eager decided stays as it was; `tipped` are the nodes where it would not have.
    """

    def __init__(
        self, module: fx.GraphModule, decided: dict[fx.Node, torch.Tensor], seed: int, *, coarse: bool
    ) -> None:
        super().__init__(module)
        self.decided = decided
        self.coarse = coarse
        self.tipped: set[fx.Node] = set()
        self.generator = torch.Generator().manual_seed(seed)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _name(target) == "bernoulli":
            # One unit above a sigmoid of 1 is no probability.
            args = (args[0].clamp(0, 1), *args[1:])
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n in self.decided:
            if not torch.equal(result, self.decided[n]) and not result.isnan().any():
                self.tipped.add(n)
            return self.decided[n].clone()
        if not isinstance(n.target, torch._ops.OpOverload) or n.target._schema.is_mutable or _name(n.target) in EXACT:
            return result
        return fx.node.map_aggregate(result, self._rounded)

    def _rounded(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not is_inexact(value):
            return value
        if value.is_complex():
            return torch.view_as_complex(self._rounded(torch.view_as_real(value.resolve_conj())).contiguous())
        if value.dtype is not torch.float32 and not self.coarse:
            return value
        off = 2 * torch.rand(value.shape, generator=self.generator, dtype=torch.float64) - 1
        return (value.double() * (1 + off * torch.finfo(value.dtype).eps)).to(value.dtype)


class _Exact(_Rounded):
    """Rounds the result of every operator once, and nothing inside of it."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().call_function(target, args, kwargs)
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", (torch.Tag.nondeterministic_seeded,)):
            return result
        try:
            wide = target(*tree_map(_widened, args), **tree_map(_widened, kwargs))
        except (RuntimeError, TypeError):
            return result
        return tree_map(lambda w, r: w.to(r.dtype) if isinstance(r, torch.Tensor) else r, wide, result)

    def _rounded(self, value: Any) -> Any:
        return value


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _name(target: Any) -> str:
    return str(target._schema.name.removeprefix("aten::")) if isinstance(target, torch._ops.OpOverload) else ""
