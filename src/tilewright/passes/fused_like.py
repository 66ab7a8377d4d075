"""Fuses a graph as the same graph was fused at other sizes: which operators share a kernel is decided once.

    exp, sum, div at 200 rows: one kernel for exp and sum, one for div   →   the same two at 40 rows, where one would do

A program for all sizes of a graph has one structure; only its numbers depend on the sizes (`compile/symbolic.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from tilewright.loops.lower import lower
from tilewright.loops.sizes import NotAlike
from tilewright.operators.axes import Unfusable
from tilewright.passes.fusion import Region
from tilewright.passes.rematerialise import Copied, copy_again
from tilewright.passes.units import live_out, with_results


def fuse_like(graph: fx.Graph, regions: Sequence[Region], copied: Sequence[Copied]) -> list[Region]:
    """The regions of `graph` with the members that `regions` have in another graph, after the same copies of chains.
    Raises NotAlike where it has other nodes, or they cannot be one kernel at its sizes."""
    try:
        copy_again(graph, copied)
        named = {node.name: node for node in graph.nodes}
        members = [[named[node.name] for node in region.members] for region in regions]
    except KeyError as error:
        raise NotAlike(f"at some of them it has no {error.args[0]}") from error
    order = {node: place for place, node in enumerate(graph.nodes)}
    try:
        return [_like(region, nodes, order) for region, nodes in zip(regions, members, strict=True)]
    except Unfusable as error:
        raise NotAlike(str(error)) from error


def _like(region: Region, members: list[fx.Node], order: dict[fx.Node, int]) -> Region:
    lowered = lower(with_results(members, order), live_out(members), region.kernel, region.language)
    return Region(members, lowered, region.name)
