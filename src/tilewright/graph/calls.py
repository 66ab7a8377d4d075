"""The arguments and results of a captured node, as plain values and shapes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from tilewright.operators.table import row_of
from tilewright.records.errors import CaptureError

if TYPE_CHECKING:
    from torch import SymFloat, SymInt, Tensor, dtype
    from torch.fx import Node
    from torch.fx.node import Argument

    from tilewright.records.program import OperatorClass

T = TypeVar("T")

LAUNCHED = "launched"
"""Key of a node's metadata: the operator that runs on the target device, if it is another one."""


def launched(node: Node) -> object:
    """The operator that runs where the graph is planned for."""
    return node.meta.get(LAUNCHED, node.target)


def operator_name(target: object) -> str:
    """`mm` for an ATen operator, `tilewright.softmax` for one of tilewright's; else the function's name.

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
    """All arguments of an operator call by schema name, defaults included; {} without a schema."""
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


def class_of(node: Node) -> OperatorClass:
    """The class of the operator that a node calls, by its row of the table; `unknown` without one."""
    row = row_of(node.target) if node.op == "call_function" else None
    return "unknown" if row is None else row.operator_class


def closure(start: Iterable[T], step: Callable[[T], Iterable[T]]) -> set[T]:
    """The transitive closure: `start` and everything that `step` reaches from it."""
    found, todo = set(start), list(start)
    while todo:
        for node in step(todo.pop()):
            if node not in found:
                found.add(node)
                todo.append(node)
    return found


def through(node: Node, passes: Callable[[Node], bool]) -> Node:
    """The source of `node`: follows first operands as long as `passes` is true of the call."""
    while passes(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def readers(node: Node) -> Iterator[Node]:
    """The operators (and the output node) that read `node`'s value, through operators that only change its layout."""
    for user in node.users:
        if class_of(user) == "layout":
            yield from readers(user)
        else:
            yield user


def mark(node: Node, name: str) -> None:
    """Mark a call of torch's: the ATen operators that it becomes are marked too."""
    # AOTAutograd copies only this key of a node's metadata.
    node.meta["custom"] = {**node.meta.get("custom", {}), name: True}


def is_marked(node: Node, name: str) -> bool:
    return name in node.meta.get("custom", {})


def is_view(node: Node) -> bool:
    """Whether the call returns a view of its first operand."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    # The schema of `_unsafe_view` declares a new tensor, but it shares storage.
    return operator_name(node.target) == "_unsafe_view" or bool(getattr(node.target, "is_view", False))


def is_mutation(node: Node) -> bool:
    """Whether the call writes to one of its operands."""
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def gives_operand(node: Node) -> bool:
    """Whether the call writes to its first operand and returns it."""
    schema = getattr(node.target, "_schema", None)
    return is_mutation(node) and any(result.alias_info is not None for result in schema.returns)  # type: ignore[union-attr]


def outputs(node: Node) -> tuple[Tensor | None, ...]:
    """The result tensors of a node; None for a result that is not a tensor."""
    import torch

    value = node.meta.get("val")
    if value is None and node.op == "get_attr" and node.graph.owning_module is not None:
        value = operator.attrgetter(str(node.target))(node.graph.owning_module)
    values = value if isinstance(value, tuple | list) else (value,)
    return tuple(v if isinstance(v, torch.Tensor) else None for v in values)


def has_many_outputs(node: Node) -> bool:
    """Whether the node's result is a tuple, whose elements `getitem` nodes select."""
    return isinstance(node.meta.get("val"), tuple | list)


def output(node: Node) -> Tensor | None:
    """The tensor of a node with one output, else None."""
    return None if has_many_outputs(node) else outputs(node)[0]


def tensor(node: object) -> Tensor:
    """The tensor of a node that has one output, as an assertion."""
    found = output(node)  # type: ignore[arg-type]
    assert found is not None, f"{node} is no tensor"
    return found


def results(node: Node) -> list[Tensor]:
    """The result tensors of a node, without those that are absent."""
    return [tensor for tensor in outputs(node) if tensor is not None]


def nbytes(node: Node) -> int:
    """Bytes of all results of a node."""
    return sum(prod(shape_of(tensor)) * tensor.dtype.itemsize for tensor in results(node))


def dtype_name(kind: dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(kind).removeprefix("torch.")


def number(size: Any) -> int:
    """A size, or a node that computes one, as a number; a dynamic size has the value with which it was captured.

    Raises `CaptureError` for a size that depends on data.
    """
    if not isinstance(size, int) and (meta := getattr(size, "meta", None)) is not None:
        size = meta.get("val", meta.get("example_value"))
    if isinstance(size, int):
        return size
    hint = _hint(size)
    if hint is None:
        raise CaptureError(f"the size {size} depends on the data: it is not known before the program runs")
    return int(hint)


def is_known(size: int | SymInt | SymFloat) -> bool:
    """Whether `number` returns a value for this size."""
    return isinstance(size, int) or _hint(size) is not None


def _hint(size: SymInt | SymFloat) -> int | None:
    known: int | None = size.node.maybe_as_int()
    return size.node.hint if known is None else known


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    return tuple(number(size) for size in tensor.shape)


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """Strides in elements."""
    return tuple(number(stride) for stride in tensor.stride())
