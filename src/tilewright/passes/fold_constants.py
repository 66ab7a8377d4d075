"""Calls on constant 0-d tensors are computed once, when the program is compiled.

    s = sqrt(lift_fresh_copy(_tensor_constant0)); y = div(x, s)     →   y = div(x, 8.0)

    w = where(m, lift_fresh_copy(_tensor_constant1), x)         →   w = where(m, scalar_tensor(0.0), x)

A single number in a tensor on the CPU would be copied to the GPU before each kernel that reads it, and the host would
wait for each copy. If a pointwise operator takes no number as an argument, its kernel makes the tensor.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import fx

from tilewright.graph.insert import insert_known
from tilewright.graph.writes import written
from tilewright.hardware.target import Target
from tilewright.operators.table import row_of
from tilewright.passes.simplify import is_pure
from tilewright.pytorch.state import in_real_tensors

aten = torch.ops.aten
CONVERTED = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor})
"""Overloads for tensors that also take a number as an operand; others raise."""


def fold_constants(graph: fx.Graph, target: Target) -> None:
    """Rewrite `graph` in place."""
    known: dict[fx.Node, torch.Tensor] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            value = _constant(node)
        else:
            value = _scalar_tensor_value(node) if node.target is aten.scalar_tensor.default else _computed(node, known)
        if value is not None:
            known[node] = value
    for node, value in known.items():
        with in_real_tensors():
            number = value.item()
        for user in [user for user in node.users if user not in known]:
            if _takes_number(user, node):
                user.args = tuple(number if argument is node else argument for argument in user.args)
                user.target = _scalar_overload(user.target)
            elif _reads_in_kernel(user) and (node.target is not aten.scalar_tensor.default or len(node.users) > 1):
                user.replace_input_with(node, _insert_scalar_tensor(number, node, user))
    for node in reversed(list(known)):
        if not node.users:
            graph.erase_node(node)


def _insert_scalar_tensor(number: Any, node: fx.Node, user: fx.Node) -> fx.Node:
    """A tensor of `number` in front of `user` and on its device, with the dtype of `node`."""
    value, device = node.meta["val"], user.meta["val"].device
    with value.fake_mode:
        fake = torch.empty((), dtype=value.dtype, device=device)
    return insert_known(user, aten.scalar_tensor.default, fake, number, dtype=value.dtype, device=device)


def _reads_in_kernel(user: fx.Node) -> bool:
    """Whether it is a pointwise operator, for which a tensor without dimensions may be on any device."""
    row = row_of(user.target) if user.op == "call_function" else None
    given = isinstance(user.meta.get("val"), torch.Tensor)
    return given and row is not None and row.body is not None and row.operator_class == "pointwise"


def _constant(node: fx.Node) -> torch.Tensor | None:
    """A single number on the CPU that the module holds and that nothing writes to."""
    if node.graph.owning_module is None or any(node in written(user) for user in node.users):
        return None
    return _number(attrgetter(str(node.target))(node.graph.owning_module))


def _scalar_tensor_value(node: fx.Node) -> torch.Tensor | None:
    """The constant of a `scalar_tensor` on any device; None if it is unknown or a reader writes to the tensor."""
    number = node.args[0]
    if not isinstance(number, bool | int | float) or any(node in written(user) for user in node.users):
        return None
    with in_real_tensors():
        return torch.tensor(number, dtype=node.meta["val"].dtype)


def _number(value: Any) -> torch.Tensor | None:
    is_plain = type(value) is torch.Tensor and value.dim() == 0 and value.device.type == "cpu"
    return value if is_plain and not value.is_complex() else None


def _computed(node: fx.Node, known: dict[fx.Node, torch.Tensor]) -> torch.Tensor | None:
    """The result of a call whose operands are known numbers; None if a reader writes to it."""
    operands, target = node.all_input_nodes, node.target
    if not operands or not is_pure(node) or not all(x in known for x in operands):
        return None
    if not isinstance(target, torch._ops.OpOverload) or any(node in written(user) for user in node.users):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
    with in_real_tensors(), torch.no_grad():
        return _number(target(*args, **kwargs))


def _scalar_overload(target: Any) -> Any:
    """The overload of a binary operator whose second operand may be a number; None where there is none."""
    if target in CONVERTED:
        return target
    name = target._overloadname.replace("Tensor", "Scalar")
    overloads = target._overloadpacket.overloads()
    return getattr(target._overloadpacket, name) if "Scalar" in name and name in overloads else None


def _takes_number(user: fx.Node, node: fx.Node) -> bool:
    """Whether a pointwise operator gives the same for a number in place of this tensor."""
    row = row_of(user.target) if user.op == "call_function" else None
    result = user.meta.get("val")
    if row is None or row.body is None or row.operator_class != "pointwise" or node not in user.args:
        return False
    of_numbers = row_of(_scalar_overload(user.target))
    if of_numbers is None or of_numbers.body is None:
        return False
    others = [x.meta.get("val") for x in user.all_input_nodes if x is not node]
    other = others[0] if len(others) == 1 else None
    if len(user.args) != 2 or not isinstance(other, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    if user.args[0] is node and user.target not in CONVERTED:
        return False
    # If the result has the other operand's dtype, the number's dtype does not matter.
    return result.dtype == other.dtype and other.dim() > 0 and other.is_floating_point()
