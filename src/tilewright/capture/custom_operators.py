"""Gradients of custom operators that read their data (`torch.library.register_autograd`): calls of one operator.

AOTAutograd traces a gradient's Python formula on tensors without data. One that reads numbers (`offsets.tolist()`, as
the experts of transformers do on a CPU) cannot be traced, and its whole graph would run as PyTorch runs it. Instead the
trace records a call of this operator, which runs the formula on real tensors:

    gradients = tilewright_custom::backward(context, incoming gradients, held tensors, sizes)

`context` is the number of a `_Context`, which has the formula's constants, the places of its tensors, and the dtypes
and devices of its results. `sizes` are those of the results, then those among the formula's attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tilewright.records.errors import CaptureError

_INPUTS = "tilewright_inputs"
"""Attribute of a formula's context: the operands of the traced call."""


@dataclass(frozen=True)
class _Context:
    """The state of a traced formula, with placeholders for its tensors and sizes."""

    formula: Callable[..., Any]
    spec: TreeSpec
    leaves: tuple[Any, ...]
    """The leaves of the context's attributes: plain values, `Tensor` for a held tensor, `torch.SymInt` for a size."""
    needed: tuple[bool, ...]
    operands: tuple[tuple[int, int, torch.dtype, torch.device], ...]
    """Index, number of dimensions, dtype and device of each operand that needs a gradient."""

    def filled(self, held: Sequence[Tensor], sizes: Sequence[int]) -> SimpleNamespace:
        """The context with these tensors and sizes."""
        tensors, numbers = iter(held), iter(sizes)
        given = {Tensor: tensors, torch.SymInt: numbers}
        leaves = [next(given[leaf]) if leaf in (Tensor, torch.SymInt) else leaf for leaf in self.leaves]
        return SimpleNamespace(**tree_unflatten(leaves, self.spec), needs_input_grad=self.needed)


_contexts: list[_Context] = []
_library = torch.library.Library("tilewright_custom", "DEF")
_library.define("backward(int context, Tensor?[] gradients, Tensor[] held, SymInt[] sizes) -> Tensor[]")


def _results(number: int, gradients: Sequence[Tensor | None], held: Sequence[Tensor], sizes: Any) -> list[Tensor]:
    context = _contexts[number]
    dimensions = sum(count for _, count, *_ in context.operands)
    found = context.formula(context.filled(held, sizes[dimensions:]), *gradients)
    found = found if isinstance(found, tuple) else (found,)
    given = {x.untyped_storage()._cdata for x in (*held, *gradients) if x is not None}
    results = []
    for (place, *_), zeros in zip(context.operands, _fakes(number, gradients, held, sizes, torch.zeros), strict=True):
        result = zeros if found[place] is None else found[place].contiguous()
        # An operator's results are its own.
        results.append(result.clone() if result.untyped_storage()._cdata in given else result)
    return results


def _fakes(
    number: int, gradients: object, held: object, sizes: Sequence[Any], make: Callable[..., Tensor] = torch.empty
) -> list[Tensor]:
    results: list[Tensor] = []
    begin = 0
    for _, dimensions, dtype, device in _contexts[number].operands:
        results.append(make(sizes[begin : begin + dimensions], dtype=dtype, device=device))
        begin += dimensions
    return results


_library.impl("backward", _results, "CompositeExplicitAutograd")
torch.library.register_fake("tilewright_custom::backward", _fakes, lib=_library)


def call_gradients(module: fx.GraphModule) -> bool:
    """Trace the gradients of the custom operators in `module` as calls from now on; False where there are none."""
    from torch._library.custom_ops import OPDEFS

    found = False
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            operator = node.target.overloadpacket if isinstance(node.target, OpOverload) else node.target
            definition: Any = OPDEFS.get(getattr(operator, "_qualified_op_name", ""))
            formula = getattr(definition, "_backward_fn", None)
            if formula is not None and not hasattr(formula, _INPUTS) and _takes_single_tensors(operator.default):
                definition._setup_context_fn = _noting_inputs(definition._setup_context_fn)
                definition._backward_fn = _calling(formula)
                found = True
    return found


def _takes_single_tensors(operator: OpOverload) -> bool:
    """Whether no operand or result is a list of tensors."""
    values = [*operator._schema.arguments, *operator._schema.returns]
    return not any("Tensor" in str(value.type) and "List" in str(value.type) for value in values)


def _noting_inputs(setup: Callable[..., None] | None) -> Callable[..., None]:
    def note(ctx: Any, inputs: tuple[Any, ...], output: Any, **others: Any) -> None:
        if setup is not None:
            setup(ctx=ctx, inputs=inputs, output=output, **others)
        if _is_traced(inputs):
            setattr(ctx, _INPUTS, inputs)

    return note


def _is_traced(values: Sequence[Any]) -> bool:
    from torch._subclasses.functional_tensor import FunctionalTensor

    return any(isinstance(x, FunctionalTensor) for x in values)


def _calling(formula: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls the formula, or, while AOTAutograd traces, records a call of it."""

    def backward(ctx: Any, *gradients: Any) -> Any:
        if not _is_traced(gradients):
            return formula(ctx, *gradients)
        inputs = getattr(ctx, _INPUTS)
        attributes = {name: _plain(value) for name, value in vars(ctx).items() if name != _INPUTS}
        leaves, spec = tree_flatten(attributes | {"saved_tensors": tuple(ctx.saved_tensors)})
        wanted = [(i, x) for i, x in enumerate(inputs) if isinstance(x, Tensor) and ctx.needs_input_grad[i]]
        operands = tuple((i, x.dim(), x.dtype, x.device) for i, x in wanted)
        kinds = tuple(map(_constant_or_kind, leaves))
        _contexts.append(_Context(formula, spec, kinds, tuple(ctx.needs_input_grad), operands))
        held = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        sizes = [size for _, x in wanted for size in x.shape] + [x for x in leaves if isinstance(x, torch.SymInt)]
        found = torch.ops.tilewright_custom.backward(len(_contexts) - 1, list(gradients), held, sizes)
        results: list[Tensor | None] = [None] * len(inputs)
        for (place, _), result in zip(wanted, found, strict=True):
            results[place] = result
        return tuple(results)

    setattr(backward, _INPUTS, True)
    return backward


def _plain(value: Any) -> Any:
    """A shape as a tuple, whose sizes may be symbolic."""
    return tuple(value) if isinstance(value, torch.Size) else value


_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)


def _constant_or_kind(leaf: Any) -> Any:
    for kind in (Tensor, torch.SymInt):
        if isinstance(leaf, kind):
            return kind
    if isinstance(leaf, _CONSTANTS):
        return leaf
    raise CaptureError(f"the gradient of a custom operator holds a {type(leaf).__name__}, which may change")
