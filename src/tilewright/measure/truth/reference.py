"""The float64 reference: runs a captured graph twice in lockstep, as eager does and in float64.

Both runs start from the same rounded inputs. The float64 run takes over eager's values where a rounding error could
flip a result: integers and bools (comparisons, casts, argmax), discontinuous floats (floor, sign), and random draws.
So both take the same branches and dropout masks, and their difference is eager's rounding error.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import fx

JUMPS = frozenset(
    {"floor", "ceil", "trunc", "fix", "frac", "round", "sign", "sgn", "heaviside", "copysign", "nextafter"}
    | {"floor_divide", "remainder", "fmod", "frexp"}
    | {f"fake_quantize_per_{kind}_affine_cachemask" for kind in ("tensor", "channel")}
)
"""ATen operators with discontinuous floating results."""

SMALLEST_EPS = 1.1920928955078125e-07
"""RMS norm's default eps, for every dtype up to fp32."""


@dataclass(frozen=True)
class Pair:
    """One value of a program, of the eager run and of the float64 run; the same tensor for integers and bools."""

    eager: Any
    truth: Any


def reference_run(module: fx.GraphModule, inputs: Sequence[object]) -> list[Pair]:
    """The results of an ATen graph, one `Pair` each, from `inputs` (tensors or scalars) in placeholder order.

    Random operators draw from the default generator, so seed it first. Operators may write to their operands;
    `inputs` are copied first. Exceptions of the operators pass through.
    """
    import torch

    with torch.no_grad():
        return _Lockstep(module, inputs).run()


class _Lockstep:
    def __init__(self, module: fx.GraphModule, inputs: Sequence[object]) -> None:
        self.module = module
        self.waiting = list(reversed(inputs))
        self.values: dict[fx.Node, Any] = {}

    def run(self) -> list[Pair]:
        results: list[Pair] = []
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = _copy_for_both(self.waiting.pop())
            elif node.op == "get_attr":
                self.values[node] = _copy_for_both(operator.attrgetter(str(node.target))(self.module))
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            else:
                flat = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
                results = [self._argument(value) for value in flat]
        return results

    def _argument(self, value: object) -> Pair:
        value = self.values.get(value, value)  # type: ignore[call-overload]
        return value if isinstance(value, Pair) else Pair(value, value)

    def _call(self, node: fx.Node) -> Any:
        import torch
        from torch.fx.node import map_arg

        if node.target is operator.getitem:
            source, index = node.args
            return self.values[source][index]  # type: ignore[index]
        eager = map_arg((node.args, node.kwargs), lambda n: self.values[n].eager)
        truth = map_arg((node.args, node.kwargs), lambda n: self.values[n].truth)
        target: Any = node.target
        if isinstance(target, torch._ops.HigherOrderOperator):
            return _pairs(target(*eager[0], **eager[1]), target(*truth[0], **truth[1]))
        if not isinstance(target, torch._ops.OpOverload):
            result = target(*eager[0], **eager[1])
            return _pairs(result, result)
        result = target(*eager[0], **eager[1])
        if target is torch.ops.aten.native_dropout.default:
            return _pairs(result, _dropout(truth[0], result))
        if _decided_by_eager(target, eager, result):
            return _pairs(result, _follow(target, eager, truth, result))
        args, kwargs = _in_float64(target, eager[0], truth)
        return _pairs(result, _run_float64(target, args, kwargs))


def _decided_by_eager(target: torch._ops.OpOverload, eager: Any, result: Any) -> bool:
    """Whether the float64 run takes over eager's result."""
    import torch

    name = target._schema.name.removeprefix("aten::").rstrip("_")
    if (
        name in JUMPS
        or str(target) == "aten.view.dtype"
        or (name == "div" and dict(eager[1]).get("rounding_mode") is not None)
    ):
        return True
    if torch.Tag.nondeterministic_seeded in target.tags:
        # Attention is tagged as random even without dropout.
        return "scaled_dot_product" not in name or _has_dropout(target, eager)
    many = result if isinstance(result, (tuple, list)) else (result,)
    return not any(isinstance(t, torch.Tensor) and _is_float(t) for t in many)


def _has_dropout(target: torch._ops.OpOverload, eager: Any) -> bool:
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, eager[0], strict=False)) | eager[1]
    return bool(given.get("dropout_p", 0.0))


def _follow(target: torch._ops.OpOverload, eager: Any, truth: Any, result: Any) -> Any:
    """Eager's result for the float64 run; for an in-place operator, written to the float64 operand."""
    schema = target._schema
    if not schema.is_mutable:
        return _widened(result)
    written = None
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            place: Any = position if position < len(eager[0]) else argument.name
            part = 0 if position < len(eager[0]) else 1
            written = truth[part][place]
            if written is not eager[part][place]:
                written.copy_(eager[part][place])
    return written if not isinstance(result, (tuple, list)) else _widened(result)


def _dropout(args: Sequence[Any], result: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """x · mask / (1 - p) with eager's mask."""
    x, p, train = args
    mask = result[1]
    if train is False or p == 0:
        return x, mask
    return (x * mask / (1 - p) if p < 1 else x * 0), mask


def _in_float64(target: torch._ops.OpOverload, eager: Sequence[Any], truth: Any) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a float64 call: floating dtypes become float64; defaults that depend on the dtype stay eager's."""
    import torch

    args, kwargs = [_wide_dtype(a) for a in truth[0]], {k: _wide_dtype(v) for k, v in truth[1].items()}
    name = target._schema.name
    if name in ("aten::_softmax", "aten::_log_softmax"):
        args[2] = False
    if name == "aten::_fused_rms_norm" and args[3] is None and eager[0].dtype is not torch.float64:
        args[3] = SMALLEST_EPS
    return args, kwargs


def _run_float64(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    import torch

    # The float64 operand's strides may differ from eager's and not allow this view.
    if target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        return torch.ops.aten.reshape.default(*args)
    if target is torch.ops.aten._weight_norm_interface.default:
        # On a GPU its root is of fp32.
        v, g, *dim = args
        norms = torch.norm_except_dim(v, 2, *dim)
        return v * (g / norms), norms
    if target is torch.ops.aten._grouped_mm.default:
        return _grouped_product(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("offs"))
    # What has no dtype of its own takes the default one: constants, and quotients of integers.
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return target(*args, **kwargs)
    finally:
        torch.set_default_dtype(default)


def _grouped_product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    """`_grouped_mm`, which has no float64: products of groups of rows, columns or inner indices that end at `ends`.

    Rows and columns behind the last end, which the operator leaves as they are, become zeros.
    """
    import torch

    if ends is None:
        return a @ b
    bounds = [0, *ends.tolist()]
    groups = [slice(*pair) for pair in itertools.pairwise(bounds)]
    if a.dim() == b.dim():
        return torch.stack([a[:, group] @ b[group] for group in groups])
    by_row = a.dim() == 2
    parts = [a[group] @ b[i] if by_row else a[i] @ b[:, group] for i, group in enumerate(groups)]
    missing = (len(a) if by_row else b.shape[1]) - bounds[-1]
    whole = torch.cat(parts, 0 if by_row else 1)
    return torch.nn.functional.pad(whole, (0, 0, 0, missing) if by_row else (0, missing))


def _wide_dtype(value: Any) -> Any:
    import torch

    if not isinstance(value, torch.dtype):
        return value
    return torch.float64 if value.is_floating_point else torch.complex128 if value.is_complex else value


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _pairs(eager: Any, truth: Any) -> Any:
    """A `Pair`, or a list of them for several results; tensors that are not floating are eager's in both runs."""
    import torch

    if isinstance(eager, (tuple, list)):
        return [_pairs(e, t) for e, t in zip(eager, truth, strict=True)]
    same = isinstance(eager, torch.Tensor) and not _is_float(eager)
    return Pair(eager, eager if same else truth)


def _widened(result: Any) -> Any:
    import torch

    if isinstance(result, (tuple, list)):
        return [_widened(r) for r in result]
    if not isinstance(result, torch.Tensor) or not _is_float(result):
        return result
    return result.to(torch.complex128 if result.is_complex() else torch.float64, copy=True)


def _copy_for_both(value: Any) -> Any:
    """A copy of an input for each run; the float64 one has the same strides."""
    import torch

    if not isinstance(value, torch.Tensor):
        return Pair(value, value)
    value = value.detach()
    if value.layout is not torch.strided:
        eager = value.clone()
        return Pair(eager, _widened(eager))
    # Copy the whole storage, so that expanded and gapped tensors keep their strides.
    storage = whole_storage(value)
    shape, strides, offset = value.shape, value.stride(), value.storage_offset()
    eager = storage.clone().as_strided(shape, strides, offset)
    if not _is_float(value):
        return Pair(eager, eager)
    return Pair(eager, _widened(storage).as_strided(shape, strides, offset))


def copies(inputs: Sequence[Any]) -> list[Any]:
    """New leaf tensors with the same values, strides and sharing of storage; other values are passed through."""
    import torch

    copied: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)
        key = (tensor.untyped_storage().data_ptr(), tensor.dtype)
        if key not in copied:
            copied[key] = whole_storage(tensor).clone()
        same = copied[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return same.detach().requires_grad_(tensor.requires_grad)

    return [copy(value) if isinstance(value, torch.Tensor) else value for value in inputs]


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in the storage of a strided tensor, as one row."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((elements,), (1,), 0)
