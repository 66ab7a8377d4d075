"""Decides which forward values to save for backward, and which to recompute there.

Saving costs memory from forward to backward. Recomputing costs at most one pass over memory, and none if the pointwise
chain fuses with its reader. A value is recomputed, through any number of pointwise operators and row normalisations, if
that saves fewer bytes: gelu's result from its operand, a layer norm's from its input, a masked value from the mask.
Random draws, reductions and matrix products are always saved. So are operands of convolutions, which on a GPU take
about as long as one pass over the operand, unless the operand has much padding.

If a library call's result and a pointwise value of it have equal bytes, the result is saved: it is in memory anyway,
and the pointwise value may stay in registers. A residual stream is saved: computed again from its terms, it depends on
that of the layer before, and backward would begin with one kernel that writes those of all layers.

What backward compares, rounds, sorts or otherwise treats discontinuously has the bits that forward had, or no element
equals the maximum, and the gradient is 0/0:

    forward:  y = gelu(x); m = amax(y)        backward:  hit = y == m; dy = dm · hit / sum(hit)

Such a value is computed again only if all kernels round it alike (`is_repeatable`), and else saved, or in its place the
comparison's result, which takes a byte (`_masks`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from tilewright.capture.partition import OVERWRITTEN
from tilewright.graph.calls import class_of, closure, nbytes, readers, results, strides_of
from tilewright.graph.undefined import gradients
from tilewright.loops.exact import is_discontinuous
from tilewright.loops.trace import is_repeatable
from tilewright.operators.table import row_of
from tilewright.passes.units import has_known_sizes, is_fusible, is_view, picks, stored

CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
PAD = torch.ops.aten.constant_pad_nd.default
BESIDE = 1 / 64
"""Share of a value's bytes that may be saved for a mask beside the library's result."""
LEAST = 2**20
"""Bytes; a smaller value is written and read while a kernel starts."""


def values_to_save(graph: fx.Graph, needed: Sequence[fx.Node], forward: set[fx.Node]) -> list[fx.Node]:
    """A subset of `forward`, and of masks that it can compute, from which backward can compute all of `needed`; inputs
    are free."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    late = gradients(graph)
    if masks := _masks(graph, forward, late):
        forward = forward | masks
        used = closure([graph.output_node()], lambda node: node.all_input_nodes) - forward
        needed = [node for node in (*needed, *masks) if used & node.users.keys()]
    saved = {stored(node) for node in needed}
    exact = {stored(node) for node in needed} & set(map(stored, _compared(graph, forward, late)))
    # The calls of backward that read a value from memory.
    calls = {node: [x for x in readers(node) if x not in forward and is_fusible(x) is not None] for node in saved}
    # Values that only kernels read are computed in these kernels, from values that are saved anyway; masks last, since
    # they may stand for values that are computed again.
    ranks = {node: (not _is_mask(node), not calls[node], order[node]) for node in saved}
    for node in sorted(saved, key=ranks.__getitem__, reverse=True):
        if node not in saved or node.op == "placeholder" or not _recomputable(node):
            continue
        if node in exact and not is_repeatable(_operator(node)):
            continue
        if any(call.target is CONVOLUTION_BACKWARD for call in calls[node]) and not _is_padded(node):
            continue
        found = _sources(node, saved - {node}, node in exact)
        sources = {source for source, _ in found}
        if any(source.meta.get(OVERWRITTEN) for source in sources):
            continue
        extra = {s for s in sources if s not in saved and s.op != "placeholder"}
        if not all(map(has_known_sizes, extra)):
            continue
        most = nbytes(node) - 1 if not _needs_no_memory(node, sources, forward) else nbytes(node) * (1 + BESIDE)
        if extra <= forward and sum(map(nbytes, extra)) <= most:
            saved = (saved - {node}) | sources
            exact |= {source for source, is_exact in found if is_exact}
    return sorted(saved, key=order.__getitem__)


def _needs_no_memory(node: fx.Node, sources: set[fx.Node], forward: set[fx.Node]) -> bool:
    """Whether a pointwise value need not be written: only forward's kernels read it, and it is computed from results of
    library calls, which are in memory anyway, and from little else. A copy to another layout is better read than
    repeated by each kernel."""
    inside = class_of(_operator(node)) == "pointwise" and not picks(node)
    made = [s for s in sources if s.op != "placeholder"]
    large = [s for s in made if not has_known_sizes(s) or nbytes(s) > nbytes(node) * BESIDE]
    return (
        inside
        and nbytes(node) >= LEAST
        and all(is_fusible(_operator(source)) is not None for source in large)
        and not _is_laid_again(node, sources)
        and all(is_fusible(reader) is None for reader in readers(node) if reader in forward or reader.op == "output")
    )


def _is_laid_again(node: fx.Node, sources: set[fx.Node]) -> bool:
    """Whether a value is computed from a copy in another layout."""
    chain = closure([node], lambda x: [] if x in sources else x.all_input_nodes)
    copies = [x for x in chain if x.target is torch.ops.aten.clone.default and has_known_sizes(x)]
    return any(strides_of(x.meta["val"]) != strides_of(x.all_input_nodes[0].meta["val"]) for x in copies)


def _is_padded(node: fx.Node) -> bool:
    """Whether an eighth of a value or more is padding, as `pad_groups` makes it."""
    return node.target is PAD and nbytes(node) * 8 >= nbytes(node.all_input_nodes[0]) * 9


def _masks(graph: fx.Graph, forward: set[fx.Node], late: set[fx.Node]) -> set[fx.Node]:
    """Comparisons of backward that see values which backward would round otherwise than forward, and what leads to
    them: forward can make them."""
    possible: set[fx.Node] = set()
    for node in graph.nodes:
        is_simple = node not in forward | late and (is_view(node) or _recomputable(node))
        if is_simple and all(operand in forward or operand in possible for operand in node.all_input_nodes):
            possible.add(node)
    return closure(filter(_is_mask, possible), lambda node: possible.intersection(node.all_input_nodes))


def _is_mask(node: fx.Node) -> bool:
    """Whether this is the outcome of a comparison whose operands another kernel would round otherwise."""
    if any(value.dtype != torch.bool for value in results(node)):
        return False
    chain = closure([(node, False)], lambda one: _operands(*one) if _recomputable(one[0]) else [])
    return any(is_exact and _recomputable(x) and not is_repeatable(_operator(x)) for x, is_exact in chain)


def _compared(graph: fx.Graph, forward: set[fx.Node], late: set[fx.Node]) -> set[fx.Node]:
    """Values from which backward computes something discontinuous without a gradient in between."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in late and any(x not in forward and (x in found or is_discontinuous(x)) for x in node.users):
            found.add(node)
    return found


def _sources(node: fx.Node, saved: set[fx.Node], is_exact: bool) -> set[tuple[fx.Node, bool]]:
    """The values that must be saved to recompute `node`: saved values, inputs, and values that cannot be recomputed.

    With each, whether it must have the bits that forward had, as where `is_exact` says so of `node`.
    """

    def is_kept(x: fx.Node, is_exact: bool) -> bool:
        if x is node:
            return False
        if x in saved or x.op == "placeholder" or not _recomputable(x) or _ends_reduction(x):
            return True
        return is_exact and not is_repeatable(_operator(x))

    chain = closure([(node, is_exact)], lambda one: [] if is_kept(*one) else _operands(*one))
    return {one for one in chain if is_kept(*one)}


def _operands(node: fx.Node, is_exact: bool) -> list[tuple[fx.Node, bool]]:
    """The values in memory that its call reads, and whether each must have the bits that forward had."""
    call = _operator(node)
    return [(stored(operand), is_exact or is_discontinuous(call)) for operand in call.all_input_nodes]


def _ends_reduction(node: fx.Node) -> bool:
    """Whether to save a pointwise value instead of the reduction's result that is its only operand and no smaller.

    A sum of exponentials whose kernel returns only its logarithm needs fewer bits.
    """
    operands = [stored(operand) for operand in node.all_input_nodes]
    if len(operands) != 1 or nbytes(node) > nbytes(operands[0]):
        return False
    return class_of(operands[0]) == "reduction" and is_fusible(operands[0]) is None


def _operator(node: fx.Node) -> fx.Node:
    """The call that computes `node`, also if `node` is one of several results."""
    source = node.args[0] if is_view(node) and node.args else node
    return source if isinstance(source, fx.Node) and picks(node) else node


def _recomputable(node: fx.Node) -> bool:
    call = _operator(node)
    row = row_of(call.target)
    if row is None or row.body is None or not has_known_sizes(node):
        return False
    if row.operator_class == "pointwise":
        return True
    return row.is_cheap_again and node.args[1:] == (0,)
