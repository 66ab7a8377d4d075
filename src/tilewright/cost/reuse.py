"""Reuse distances: how many bytes a program touches between two uses of one tensor (Mattson et al., "Evaluation
techniques for storage hierarchies", 1970). A tensor is still in the last-level cache if these bytes fit there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tilewright.cost.memory import storage
from tilewright.cost.work import Distances
from tilewright.graph import calls

if TYPE_CHECKING:
    from torch.fx import Node


def reuse_distances(launches: Sequence[tuple[Iterable[Node], Iterable[Node]]]) -> list[Distances]:
    """For each launch, given as what it reads and what it makes: bytes of each tensor read, and its reuse distance.

    The program is taken to run repeatedly: a tensor's first use in a run follows its last use in the run before.
    """
    clock = 0
    touched: dict[Node, int] = {}
    found: list[Distances] = []
    for _ in range(2):
        found = []
        for reads, makes in launches:
            read = {storage(node): node for node in reads}
            sizes = {home: min(calls.nbytes(node), calls.nbytes(home)) for home, node in read.items()}
            found.append(tuple((size, clock + size - touched.get(home, 0)) for home, size in sizes.items() if size))
            for home, size in (*sizes.items(), *((node, calls.nbytes(node)) for node in _made(makes))):
                clock += size
                touched[storage(home)] = clock
    return found


def _made(nodes: Iterable[Node]) -> Iterable[Node]:
    """The results of `nodes`; a call with several results gives each of them."""
    for node in nodes:
        yield from node.users if calls.has_many_outputs(node) else (node,)
