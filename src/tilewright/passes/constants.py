"""What a program computes from constants is computed once, when it is compiled: numbers, and tensors that go to a GPU.

    s = sqrt(lift_fresh_copy(_tensor_constant0)); y = div(x, s)     →   y = div(x, 8.0)
    w = where(m, lift_fresh_copy(_tensor_constant1), x)             →   w = where(m, scalar_tensor(0.0), x)
    s = _to_copy(0.5, dtype=float32); y = mul(x, s)     as vmap has 0.5 * x     →   y = mul(x, 0.5)

The host would wait while such a number is copied to the GPU for each kernel that reads it. If a pointwise operator
takes no number as an argument, its kernel makes the tensor.

    p = arange(512); d = p[None] - p[:, None]; b = _to_copy(d, device="cuda")     →     b = get_attr[_made_on_cpu]

Each call would compute the tensor on the CPU and wait for the copy, and no graph with tensors on the CPU can be
replayed. The CPU computes the numbers, as for eager: a GPU's logarithm may round a position into another bucket.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import fx

from tilewright.graph.calls import closure, is_view, results, tensor
from tilewright.graph.insert import insert_call
from tilewright.graph.specialise import has_symbols
from tilewright.graph.views import is_written
from tilewright.hardware.target import Target
from tilewright.operators.table import row_of
from tilewright.passes.rule import call, rule
from tilewright.passes.simplify import is_pure
from tilewright.pytorch.state import in_real_tensors

aten = torch.ops.aten
CONVERTED = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor})
"""Overloads for tensors that also take a number as an operand; others raise."""


def fold_constants(graph: fx.Graph, target: Target) -> None:
    """Rewrite `graph` in place."""
    known: dict[fx.Node, torch.Tensor] = {}
    for node in list(graph.nodes):
        _make_tensor_of_number(node)
    for node in graph.nodes:
        if (value := _number(node, known)) is not None and not is_written(node):
            known[node] = value
    for node, value in known.items():
        with in_real_tensors():
            number = value.item()
        for user in [user for user in node.users if user not in known]:
            if _takes_number(user, node):
                user.args = tuple(number if argument is node else argument for argument in user.args)
                user.target = _scalar_overload(user.target)
            elif _is_pointwise(user.target) and (node.target is not aten.scalar_tensor.default or len(node.users) > 1):
                dtype, device = node.meta["val"].dtype, results(user)[0].device
                made = insert_call(user, aten.scalar_tensor.default, number, dtype=dtype, device=device)
                user.replace_input_with(node, made)
    for node in reversed(list(known)):
        if not node.users:
            graph.erase_node(node)


def _make_tensor_of_number(node: fx.Node) -> None:
    """Give an operator the tensor of a number that stands where it takes its only tensor."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.all_input_nodes or not node.args:
        return
    first, *rest = node.args
    if isinstance(first, bool | int | float) and str(node.target._schema.arguments[0].type) == "Tensor":
        dtype = torch.float64 if isinstance(first, float) else torch.tensor(first).dtype
        node.args = (insert_call(node, aten.scalar_tensor.default, first, dtype=dtype, device="cpu"), *rest)


def _is_pointwise(target: Any) -> bool:
    """Whether a generated kernel computes the operator, element by element: then a number may be on any device."""
    row = row_of(target)
    return row is not None and row.body is not None and row.operator_class == "pointwise"


def _value(node: fx.Node, known: dict[fx.Node, torch.Tensor]) -> Any:
    """What the module holds, or a call gives for known operands."""
    if node.op == "get_attr":
        return attrgetter(str(node.target))(node.graph.owning_module)
    args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _number(node: fx.Node, known: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """A single number on the CPU: one that the module holds, that a call of any device makes a tensor, or that a call
    computes of known ones; None for any other value."""
    operands, first = node.all_input_nodes, node.args[:1]
    with in_real_tensors(), torch.no_grad():
        if node.target is aten.scalar_tensor.default:
            is_constant = isinstance(first[0], bool | int | float)
            return torch.tensor(first[0], dtype=node.meta["val"].dtype) if is_constant else None
        if node.op == "get_attr":
            is_constant = node.graph.owning_module is not None
        else:
            is_constant = bool(operands) and _is_call(node) and all(x in known for x in operands)
        value = _value(node, known) if is_constant else None
    if type(value) is not torch.Tensor or value.dim() or value.device.type != "cpu":
        return None
    return None if value.is_complex() else value


def _is_call(node: fx.Node) -> bool:
    """Whether this calls an operator that writes and draws nothing."""
    return is_pure(node) and isinstance(node.target, torch._ops.OpOverload)


def _scalar_overload(target: Any) -> Any:
    """The overload of a binary operator whose second operand may be a number; None where there is none."""
    if target in CONVERTED:
        return target
    name = target._overloadname.replace("Tensor", "Scalar")
    overloads = target._overloadpacket.overloads()
    return getattr(target._overloadpacket, name) if "Scalar" in name and name in overloads else None


def _takes_number(user: fx.Node, node: fx.Node) -> bool:
    """Whether a pointwise operator gives the same for a number in place of this tensor."""
    result = user.meta.get("val")
    if node not in user.args or not _is_pointwise(user.target) or not _is_pointwise(_scalar_overload(user.target)):
        return False
    others = [x.meta.get("val") for x in user.all_input_nodes if x is not node]
    other = others[0] if len(others) == 1 else None
    if len(user.args) != 2 or not isinstance(other, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    if user.args[0] is node and user.target not in CONVERTED:
        return False
    # If the result has the other operand's dtype, the number's dtype does not matter.
    return result.dtype == other.dtype and other.dim() > 0 and other.is_floating_point()


MOST_BYTES = 2**24
"""Bytes of the largest tensor that is kept, for as long as the program lives."""
NAME = "_made_on_cpu"


def _is_constant(node: fx.Node, source: fx.Node) -> bool:
    """Whether pure calls on the CPU compute the copied value without inputs, and nothing writes to the copy."""
    value = node.meta["val"]
    if node.graph.owning_module is None or (value.device.type, tensor(source).device.type) != ("cuda", "cpu"):
        return False
    if has_symbols(value) or value.numel() * value.element_size() > MOST_BYTES or not value.dim():
        return False
    shown = closure([node], lambda one: filter(is_view, one.users))
    if any(is_written(one) or any(user.op == "output" for user in one.users) for one in shown):
        return False
    return all(_is_repeatable(one) for one in _producers(node))


@rule(call(aten._to_copy.default, "source", ...), where=_is_constant)
def copy_constants_once(node: fx.Node) -> fx.Node:
    value, module = _copied(node), node.graph.owning_module
    assert module is not None
    name = next(f"{NAME}{i}" for i in range(len(node.graph.nodes)) if not hasattr(module, f"{NAME}{i}"))
    module.register_buffer(name, value, persistent=False)
    with node.graph.inserting_before(node):
        held = node.graph.get_attr(name)
    held.meta = dict(node.meta)
    return held


def _producers(copy: fx.Node) -> list[fx.Node]:
    return [node for node in closure([copy], lambda node: node.all_input_nodes) if node is not copy]


def _is_repeatable(node: fx.Node) -> bool:
    if is_written(node):
        return False
    if node.op == "get_attr":
        return type(_value(node, {})) is torch.Tensor
    value = node.meta.get("val")
    is_tensor = isinstance(value, torch.Tensor) and value.device.type == "cpu" and not has_symbols(value)
    return is_tensor and _is_call(node)


def _copied(copy: fx.Node) -> torch.Tensor:
    """The copy's value, on its device; on the CPU without a GPU, since a plan for an absent GPU never runs."""
    known: dict[fx.Node, torch.Tensor] = {}
    with in_real_tensors(), torch.no_grad():
        for node in sorted(_producers(copy)):
            known[node] = _value(node, known)
        fake = copy.meta["val"]
        device = fake.device if torch.cuda.is_available() else "cpu"
        made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=device)
        return made.copy_(known[copy.all_input_nodes[0]])
