"""One vocabulary for calls of torch-level graphs and of ATen operators: canonical names, arguments, examples.

    x / y, torch.div(x, y), x.true_divide(y), aten.div.Tensor(x, y)     →   div

Patterns of rewrites are written in these names, not in one for each spelling.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from tilewright.pytorch.state import unwrapped
from tilewright.records.errors import Refusal

NAMES = {
    "div": ("truediv", "true_divide", "divide"),
    "mul": ("multiply", "rmul"),
    "sub": ("subtract",),
    "add": ("radd",),
    "matmul": ("bmm", "mm"),
    "softmax": ("special_softmax",),
    "logsumexp": ("special_logsumexp",),
    "transpose": ("swapaxes", "swapdims"),
    "view": ("reshape", "unflatten", "flatten"),
    "contiguous": ("clone",),
    "cast": ("to", "type_as", "type", "float", "half", "bfloat16", "double"),
    "bitwise_not": ("invert", "logical_not"),
    "and_": ("and",),
    "or_": ("or",),
}
"""The canonical name of each operator, and its other names."""
ALIASES = {alias: name for name, aliases in NAMES.items() for alias in aliases}
OF_ATEN = {"_to_copy": "cast", "_unsafe_view": "view", "__and__": "and_", "__or__": "or_"}
IN_PLACE_OPERATORS = frozenset(
    f"i{name}" for name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "matmul")
) | {"setitem"}
OF_PYTHON = frozenset({"and_", "or_", "not_"})
"""Functions of `operator` that end in an underscore only because their names are keywords."""
MODES = frozenset({"_enter_autocast", "_exit_autocast", "_set_grad_enabled", "_enter_inference_mode"})


def canonical_name(node: Node) -> str | None:
    """The canonical name of a call (`truediv`, `aten.div.Tensor` → `div`); None if the function is not torch's."""
    return _name_of(node.op, node.target) if node.op in ("call_function", "call_method") else None


@lru_cache(4096)
def _name_of(op: str, target: Any) -> str | None:
    if isinstance(target, OpOverload):
        name = target._schema.name.partition("::")[2]
        return OF_ATEN.get(name) or ALIASES.get(name, name)
    if op == "call_method":
        raw = str(target)
    else:
        module = getattr(target, "__module__", None) or "torch"
        if module.partition(".")[0] not in ("torch", "_operator", "builtins"):
            return None
        raw = getattr(target, "__name__", "")
    if raw.startswith("__") and raw.endswith("__"):
        raw = raw[2:-2]
    return ALIASES.get(raw, raw)


def argument(node: Node, position: int, name: str, default: object = None) -> Any:
    """An argument of a call given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def convolution_operands(node: Node) -> tuple[Any, Any, Any]:
    """input, weight and bias of a convolution."""
    return argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")


def where_arguments(node: Node) -> tuple[Any, Any, Any]:
    """condition, input and other of `torch.where(condition, input, other)`, `input.where(condition, other)` or
    `other.masked_fill(condition, input)`."""
    if canonical_name(node) == "masked_fill":
        other, condition, x = (argument(node, i, name) for i, name in enumerate(("input", "mask", "value")))
        return condition, x, other
    names = ("input", "condition", "other") if node.op == "call_method" else ("condition", "input", "other")
    call = {name: argument(node, i, name) for i, name in enumerate(names)}
    return call["condition"], call["input"], call["other"]


def example(node: object) -> torch.Tensor | None:
    """The fake tensor of a node's result; None if the result is no tensor."""
    value = node.meta.get("example_value", node.meta.get("val")) if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def tensor_of(node: object) -> torch.Tensor:
    """As `example`, for a node that must be a tensor. Raises Refusal."""
    value = example(node)
    if value is None:
        raise Refusal(f"{node} has no known shape")
    return value


def same_shape(a: Sequence[int | torch.SymInt], b: Sequence[int | torch.SymInt]) -> bool:
    """Whether two shapes are equal. Compares symbols by name, since comparing their values would add a guard."""
    return len(a) == len(b) and all(str(x) == str(y) for x, y in zip(a, b, strict=True))


def static(shape: Sequence[int | torch.SymInt]) -> bool:
    """Whether no size is a symbol."""
    return all(isinstance(size, int) for size in shape)


def memory_of(node: object) -> int | None:
    """The identity of the storage of a node's result; None if that is no tensor."""
    value = example(node)
    return None if value is None else unwrapped(value).untyped_storage()._cdata


def mutates(node: Node) -> bool:
    """Whether a call writes to one of its arguments."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = canonical_name(node) or ""
    if name in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__") and name not in OF_PYTHON):
        return True
    in_place = argument(node, 3, "inplace", False) if name == "dropout" else node.kwargs.get("inplace", False)
    return bool(in_place) or "out" in node.kwargs


def written_by(node: Node) -> Any:
    """The argument that a call that `mutates` writes to."""
    return node.kwargs.get("out") or argument(node, 0, "input")


def is_last(dim: object, rank: int) -> bool:
    """Whether a call's `dim` is the last of `rank` axes alone."""
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        dim = dim[0]
    return isinstance(dim, int) and dim in (-1, rank - 1)
