"""What a node of a captured graph was called with and what it gave, as plain shapes and arguments."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from tilewright.records.errors import CaptureError

if TYPE_CHECKING:
    from torch import SymInt, Tensor
    from torch.fx import Node
    from torch.fx.node import Argument


def operator_name(target: object) -> str:
    """An ATen operator's name without its overload, tilewright's with the library's name; else the full name.

    >>> import torch
    >>> operator_name(torch.ops.aten.mm.default), operator_name(operator.getitem)
    ('mm', 'getitem')
    """
    parts = str(target).split(".")
    if parts[0] == "aten" and len(parts) == 3:
        return parts[1]
    if parts[0] == "tilewright" and len(parts) == 3:
        return f"tilewright.{parts[1]}"
    return str(getattr(target, "__name__", target))


def arguments(node: Node) -> dict[str, Argument]:
    """Every argument of an operator call by its name in the schema, with defaults; {} without a schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {}
    named: dict[str, Argument] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args):
            named[argument.name] = node.args[position]
        else:
            named[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return named


def is_view(node: Node) -> bool:
    """Whether the call returns its first operand's own storage under other indices."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    # `_unsafe_view` is declared as a fresh tensor, because nothing else holds its operand.
    return operator_name(node.target) == "_unsafe_view" or bool(getattr(node.target, "is_view", False))


def is_mutation(node: Node) -> bool:
    """Whether the call writes into one of its operands."""
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def outputs(node: Node) -> tuple[Tensor | None, ...]:
    """The tensors a node gives, one per output; None for an output that is no tensor."""
    import torch

    value = node.meta.get("val")
    if value is None and node.op == "get_attr" and node.graph.owning_module is not None:
        value = operator.attrgetter(str(node.target))(node.graph.owning_module)
    values = value if isinstance(value, tuple | list) else (value,)
    return tuple(v if isinstance(v, torch.Tensor) else None for v in values)


def has_many_outputs(node: Node) -> bool:
    """Whether the node gives a tuple, whose elements `getitem` nodes take."""
    return isinstance(node.meta.get("val"), tuple | list)


def output(node: Node) -> Tensor | None:
    """The tensor of a node with one output, else None."""
    return None if has_many_outputs(node) else outputs(node)[0]


def number(size: int | SymInt) -> int:
    """A size as a number; of a dynamic size, the one it was captured with.

    Raises `CaptureError` for a size that depends on the data.
    """
    if isinstance(size, int):
        return size
    known = size.node.maybe_as_int()
    hint = size.node.hint if known is None else known
    if hint is None:
        raise CaptureError(f"the size {size} depends on the data: it is not known before the program runs")
    return int(hint)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    return tuple(number(size) for size in tensor.shape)


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """Strides in elements."""
    return tuple(number(stride) for stride in tensor.stride())
