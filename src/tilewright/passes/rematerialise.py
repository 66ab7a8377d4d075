"""Computes a pointwise value in each kernel that reads it, if that moves fewer bytes than writing it once.

    dz = silu_backward(g, z)                           s = sum(silu_backward(g, z))
    s = sum(dz)                                →       ────────
    ────────                                           dx = silu_backward(g, z) - z · s
    dx = dz - z · s

The second kernel waits for the sum of the first, so they cannot be fused. With dz in memory they move g, z, dz and then
dz, z, dx; without it g, z and then g, z, dx. The pass runs between two calls of `fuse`, the first of which finds the
kernels; the planner takes it back if the second ones would take more than 2 % longer. A value on which a discontinuous
operator depends is copied only if all kernels compute the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from tilewright.graph.calls import class_of, nbytes, readers
from tilewright.hardware.profiles import DeviceProfile
from tilewright.loops.exact import EXACT
from tilewright.loops.trace import is_repeatable
from tilewright.passes.fusion import COPIED, Region, computes_again
from tilewright.passes.simplify import drop_unread
from tilewright.passes.units import behind_views, is_view, live_out, values_of

MOST_OPERATORS = 24
"""The longest chain that is recomputed."""
LEAST_BYTES = 2**20
"""A smaller value is read from a cache and not recomputed, unless it has no operands (a constant)."""
SMALL = 16
"""A chain may read a reduction's result that has at most 1/16 of the bytes of the chain's result."""


@dataclass(frozen=True)
class Copied:
    """A chain that was copied into a region that reads it, by the names of nodes."""

    chain: tuple[str, ...]
    """In the order of the graph."""
    reader: tuple[str, ...]
    """The region's members."""


def compute_in_each_reader(graph: fx.Graph, regions: Sequence[Region], profile: DeviceProfile) -> list[Copied]:
    """Copy chains into the regions that read them, in place; what was copied, in order. Unread calls stay."""
    region_of = {value: region for region in regions for member in region.members for value in values_of(member)}
    region_of.update({member: region for region in regions for member in region.members})
    found: list[Copied] = []
    for region in regions:
        for value in live_out(region.members):
            for reader in _readers_that_pay(value, region, region_of, profile):
                chain = _chain(value, region)
                assert chain is not None
                order = {node: place for place, node in enumerate(graph.nodes)}
                ordered = sorted(chain, key=order.__getitem__)
                names = tuple(node.name for node in ordered), tuple(node.name for node in reader.members)
                found.append(Copied(*names))
                copies = _copy_for(ordered, reader.members)
                # Later chains of this reader may run through the copies.
                reader.members += [copy for copy in copies if not is_view(copy)]
    return found


def copy_again(graph: fx.Graph, copied: Sequence[Copied]) -> None:
    """Copy the same chains of a graph with the same nodes, in place. Raises KeyError where it has others."""
    if not copied:
        return
    named = {node.name: node for node in graph.nodes}
    for each in copied:
        chain, reader = ([named[name] for name in names] for names in (each.chain, each.reader))
        copies = _copy_for(chain, reader)
        named.update((copy.name, copy) for copy in copies)
    drop_unread(graph)


def _readers_that_pay(
    value: fx.Node, region: Region, region_of: dict[fx.Node, Region], profile: DeviceProfile
) -> list[Region]:
    """The regions for which computing `value` themselves pays."""
    is_made = value.op == "call_function" and not value.all_input_nodes
    chain = _chain(value, region) if is_made or nbytes(value) >= LEAST_BYTES else None
    if chain is None:
        return []
    operands = _operands(chain)
    others = list(dict.fromkeys(region_of.get(reader) for reader in readers(value)))
    size, pays, gain = nbytes(value), [], 0
    for other in others:
        if other is None or other is region or computes_again(region, other, profile):
            continue
        given = set(map(behind_views, other.lowered.inputs))
        more = sum(nbytes(operand) for operand in operands if operand not in given)
        if more <= size + size // SMALL:
            pays.append(other)
            gain += size - more
    elsewhere = [other for other in others if other is not region and other not in pays]
    return pays if gain + (0 if elsewhere else size) > 0 else []


def _chain(value: fx.Node, region: Region) -> list[fx.Node] | None:
    """The operators of `region` that compute `value`, and the views between them; None if they cannot be recomputed."""
    inside, chain, todo = set(region.members), dict[fx.Node, None](), [value]
    while todo:
        node = todo.pop()
        if node in chain or behind_views(node) not in inside:
            continue
        if is_view(node) or (class_of(node) == "pointwise" and (not node.meta.get(EXACT) or is_repeatable(node))):
            chain[node] = None
            todo += node.all_input_nodes
        elif nbytes(node) * SMALL > nbytes(value):
            return None
    operators = [node for node in chain if not is_view(node)]
    return list(chain) if 0 < len(operators) <= MOST_OPERATORS else None


def _operands(chain: Sequence[fx.Node]) -> list[fx.Node]:
    """The tensors that the chain reads from memory."""
    inside = set(chain)
    found = (behind_views(operand) for node in chain for operand in node.all_input_nodes if operand not in inside)
    return list(dict.fromkeys(found))


def _copy_for(chain: Sequence[fx.Node], reader: Sequence[fx.Node]) -> list[fx.Node]:
    """Let the members of `reader` read a copy of the chain; the copies, those of views too."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in chain:
        # The reader may read what is inside the chain before the chain's result is computed.
        _copied(node, copies)
    for member in reader:
        _redirect(member, copies)
    return list(copies.values())


def _copied(node: fx.Node, copies: dict[fx.Node, fx.Node]) -> None:
    with node.graph.inserting_after(node):
        copies[node] = node.graph.node_copy(node, lambda operand: copies.get(operand, operand))
        copies[node].meta[COPIED] = True


def _redirect(node: fx.Node, copies: dict[fx.Node, fx.Node]) -> None:
    """Let `node` read the copies, and views of copies, instead of the originals."""
    for operand in node.all_input_nodes:
        if operand not in copies and is_view(operand) and behind_views(operand) in copies:
            _redirect_view(operand, copies)
        if operand in copies:
            node.replace_input_with(operand, copies[operand])


def _redirect_view(view: fx.Node, copies: dict[fx.Node, fx.Node]) -> None:
    source = view.args[0]
    assert isinstance(source, fx.Node)
    if source not in copies:
        _redirect_view(source, copies)
    _copied(view, copies)
