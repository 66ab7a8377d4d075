"""A tensor that the program computes on the CPU without inputs and copies to the GPU is computed and copied once.

    p = arange(512); d = p[None] - p[:, None]; b = _to_copy(d, device="cuda")     →     b = get_attr[_made_on_cpu]

Each call would compute it on the CPU again and wait for the copy, and no graph with tensors on the CPU can be replayed.
The CPU computes the numbers, as it does for eager: a GPU's logarithm may round a position into another bucket.
"""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import fx

from tilewright.graph.calls import closure, is_view, tensor
from tilewright.graph.specialise import has_symbols
from tilewright.graph.writes import written
from tilewright.passes.rule import call, rule
from tilewright.passes.simplify import is_pure
from tilewright.pytorch.state import in_real_tensors

aten = torch.ops.aten
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
    if any(user.op == "output" or one in written(user) for one in shown for user in one.users):
        return False
    return all(_is_repeatable(one) for one in _producers(node))


@rule(call(aten._to_copy.default, "source", ...), where=_is_constant)
def copy_constants_once(node: fx.Node) -> fx.Node:
    value, module = _computed(node), node.graph.owning_module
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
    if any(node in written(user) for user in node.users):
        return False
    if node.op == "get_attr":
        return type(attrgetter(str(node.target))(node.graph.owning_module)) is torch.Tensor
    value = node.meta.get("val")
    is_tensor = isinstance(value, torch.Tensor) and value.device.type == "cpu" and not has_symbols(value)
    return is_tensor and is_pure(node) and isinstance(node.target, torch._ops.OpOverload)


def _computed(copy: fx.Node) -> torch.Tensor:
    """The copy's value, on its device; on the CPU without a GPU, since a plan for an absent GPU never runs."""
    order = {node: place for place, node in enumerate(copy.graph.nodes)}
    known: dict[fx.Node, torch.Tensor] = {}
    with in_real_tensors(), torch.no_grad():
        for node in sorted(_producers(copy), key=order.__getitem__):
            if node.op == "get_attr":
                known[node] = attrgetter(str(node.target))(node.graph.owning_module)
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        fake = copy.meta["val"]
        device = fake.device if torch.cuda.is_available() else "cpu"
        made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=device)
        return made.copy_(known[copy.all_input_nodes[0]])
