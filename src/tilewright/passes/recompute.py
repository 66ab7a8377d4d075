"""Which forward values to keep for backward, and which to compute again there.

Keeping costs memory from forward to backward; computing again costs at most one pass over memory,
and none where the pointwise chain fuses with its reader. A value is computed again, through as many
pointwise operators and row normalisations as it takes, where less must then be kept: gelu's result
from its operand, a layer norm's from its input, a masked value from the mask. Random draws,
reductions and matrix products are always kept; so are operands of convolutions, which on a GPU take
about as long as a pass over them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from tilewright.graph.cut import OVERWRITTEN
from tilewright.operators.table import row_of
from tilewright.passes.units import is_fusible, is_view, nbytes, readers

CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default


def values_to_save(graph: fx.Graph, needed: Sequence[fx.Node], forward: set[fx.Node]) -> list[fx.Node]:
    """A subset of `forward` from which backward can compute all of `needed`; inputs are free."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    saved = {_stored(node) for node in needed}
    calls = {node: _library_calls(node, forward) for node in saved}
    # What kernels alone read is computed in them, from what the others need, too.
    for node in sorted(saved, key=lambda node: (not calls[node], order[node]), reverse=True):
        if node not in saved or node.op == "placeholder" or not _recomputable(node):
            continue
        if any(call.target is CONVOLUTION_BACKWARD for call in calls[node]):
            continue
        sources = _sources(node, saved - {node})
        if any(source.meta.get(OVERWRITTEN) for source in sources):
            continue
        extra = {s for s in sources if s not in saved and s.op != "placeholder"}
        if extra <= forward and sum(map(nbytes, extra)) < nbytes(node):
            saved = (saved - {node}) | sources
    return sorted(saved, key=order.__getitem__)


def _library_calls(node: fx.Node, forward: set[fx.Node]) -> list[fx.Node]:
    """The calls of backward that read a value from memory."""
    return [reader for reader in readers(node) if reader not in forward and is_fusible(reader) is not None]


def _sources(node: fx.Node, saved: set[fx.Node]) -> set[fx.Node]:
    """What must be kept to compute `node` again: the chain is followed to what is saved, an input, or
    cannot be computed again."""
    sources: set[fx.Node] = set()
    seen = {node}
    todo = [node]
    while todo:
        for operand in map(_stored, _operator(todo.pop()).all_input_nodes):
            if operand in seen:
                continue
            seen.add(operand)
            if operand in saved or operand.op == "placeholder" or not _recomputable(operand):
                sources.add(operand)
            else:
                todo.append(operand)
    return sources


def _operator(node: fx.Node) -> fx.Node:
    """The call behind one of several results."""
    source = node.args[0] if is_view(node) and node.args else node
    return source if isinstance(source, fx.Node) and _picks(node) else node


def _picks(node: fx.Node) -> bool:
    return str(node.target).endswith("getitem") or getattr(node.target, "__name__", "") == "getitem"


def _stored(node: fx.Node) -> fx.Node:
    """The value in memory that `node` is a view of: one result of several stays itself."""
    while is_view(node) and not _picks(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _recomputable(node: fx.Node) -> bool:
    call = _operator(node)
    row = row_of(call.target)
    if row is None or row.body is None or not row.pure:
        return False
    if row.operator_class == "pointwise":
        return True
    return row.is_cheap_again and node.args[1:] == (0,)
