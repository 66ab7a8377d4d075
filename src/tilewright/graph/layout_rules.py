"""How axes follow through views, concatenations, gathers and the losses made of gathers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from tilewright.graph.shape_rules import RULES, Call, Result, broadcast, rule

__all__ = ["RULES"]


@rule("view _unsafe_view reshape")
def view(call: Call) -> Result:
    return call.names.regroup(call.operands[0], call.shape)


@rule("t")
def t(call: Call) -> Result:
    return call.operands[0][::-1]


@rule("transpose")
def transpose(call: Call) -> Result:
    axes = list(call.operands[0])
    if axes:
        a, b = call.dim(len(axes), "dim0"), call.dim(len(axes), "dim1")
        axes[a], axes[b] = axes[b], axes[a]
    return tuple(axes)


@rule("permute")
def permute(call: Call) -> Result:
    order = call.arguments["dims"]
    assert isinstance(order, Sequence)
    return tuple(call.operands[0][cast("int", place)] for place in order)


@rule("expand")
def expand(call: Call) -> Result:
    wanted = call.names.unknown_shape(call.shape, guess=True)
    source = call.operands[0]
    padded = ((),) * (len(wanted) - len(source)) + source
    sizes = zip(padded, wanted, call.shape, strict=True)
    return tuple(axis if call.names.size_of(axis) == size else new for axis, new, size in sizes)


@rule("unsqueeze")
def unsqueeze(call: Call) -> Result:
    axes = list(call.operands[0])
    axes.insert(call.dim(len(axes) + 1), ())
    return tuple(axes)


@rule("squeeze")
def squeeze(call: Call) -> Result:
    source = call.operands[0]
    places = call.dims(len(source)) if "dim" in call.arguments else range(len(source))
    return tuple(axis for i, axis in enumerate(source) if i not in places or call.names.size_of(axis) != 1)


@rule("slice narrow")
def slice_(call: Call) -> Result:
    axes = list(call.operands[0])
    dim = call.dim(len(axes))
    axes[dim] = call.names.part(axes[dim], call.shape[dim])
    return tuple(axes)


@rule("split split_with_sizes chunk")
def split(call: Call) -> Result:
    axes = call.operands[0]
    dim = call.dim(len(axes))
    sizes = [shape[dim] for shape in call.shapes if shape]
    return [(*axes[:dim], call.names.part(axes[dim], size), *axes[dim + 1 :]) for size in sizes]


@rule("select unbind")
def select(call: Call) -> Result:
    axes = call.operands[0]
    dim = call.dim(len(axes))
    return call.each(axes[:dim] + axes[dim + 1 :])


@rule("cat")
def cat(call: Call) -> Result:
    # PyTorch lets an empty vector of any rank join in.
    parts = [axes for axes in call.list_of("tensors") if len(axes) == len(call.shape)]
    dim = call.dim(len(call.shape))
    others = [(*axes[:dim], (), *axes[dim + 1 :]) for axes in parts]
    flat = [1 if place == dim else size for place, size in enumerate(call.shape)]
    result = list(broadcast(call.names, others, flat))
    result[dim] = call.names.concatenated([axes[dim] for axes in parts])
    return tuple(result)


@rule("stack")
def stack(call: Call) -> Result:
    parts = call.list_of("tensors")
    dim = call.dim(len(call.shape))
    together = list(broadcast(call.names, parts, call.shape[:dim] + call.shape[dim + 1 :]))
    together.insert(dim, call.names.unknown(len(parts)))
    return tuple(together)


# Gathers and losses.


@rule("embedding")
def embedding(call: Call) -> Result:
    return call.tensor("indices") + call.tensor("weight")[1:]


@rule("embedding_dense_backward")
def embedding_backward(call: Call) -> Result:
    return call.names.unknown_shape(call.shape[:1], guess=True) + call.tensor("grad_output")[-1:]


@rule("index_select")
def index_select(call: Call) -> Result:
    axes = call.tensor("self")
    dim = call.dim(len(axes))
    return axes[:dim] + call.tensor("index") + axes[dim + 1 :]


@rule("index")
def index(call: Call) -> Result:
    """The indexed axes become those of the indices: in place where they are neighbours, else in front."""
    axes, indices = call.tensor("self"), call.arguments["indices"]
    assert isinstance(indices, Sequence)
    places = [place for place, given in enumerate(indices) if given is not None]
    given = call.list_of("indices")
    together = places[-1] - places[0] + 1 == len(places)
    start, rank = places[0] if together else 0, max(map(len, given))
    found = broadcast(call.names, given, call.shape[start : start + rank])
    rest = tuple(axis for place, axis in enumerate(axes) if place not in places)
    return rest[:start] + found + rest[start:]


@rule("gather")
def gather(call: Call) -> Result:
    return call.tensor("index")


@rule("nll_loss_forward")
def nll_loss(call: Call) -> Result:
    return [call.tensor("target") if call.shape else (), ()]


@rule("nll_loss_backward slice_backward select_backward value_selecting_reduction_backward")
def like_the_input(call: Call) -> Result:
    """The gradient of a gather: an axis that the call was given keeps its name, the others wait for one."""
    source = call.tensor("self") if "self" in call.arguments else call.operands[0]
    if len(source) != len(call.shape):
        return call.names.unknown_shape(call.shape)
    return broadcast(call.names, [source], call.shape)
