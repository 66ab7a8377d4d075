"""Live memory of a program, step by step: a tensor lives from the step that makes it to its last use. Reuse
distances: how many bytes a program touches between two uses of one tensor (Mattson et al., "Evaluation
techniques for storage hierarchies", 1970). A tensor is still in the last-level cache if these bytes fit there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from tilewright.cost.work import Distances
from tilewright.graph import calls

if TYPE_CHECKING:
    from torch.fx import Node


@dataclass(frozen=True)
class MemoryStep:
    """One launch: its name, what it reads, what it makes, what it overwrites in place, and bytes it works in."""

    name: str
    reads: tuple[Node, ...]
    makes: tuple[Node, ...]
    replaces: tuple[Node, ...] = ()
    scratch: int = 0


def live_bytes(
    steps: Sequence[MemoryStep],
    inputs: Sequence[Node],
    results: Sequence[Node],
    same: Mapping[Node, Node] = MappingProxyType({}),
) -> list[int]:
    """Bytes alive while each step runs, the step's own results and what it works in included.

    `inputs` that die inside (saved tensors of a backward graph) are alive from the start; `results` stay alive to the
    end. Views share their base's storage; `same` maps inputs that share one storage to the input that represents it.
    """

    def home(node: Node) -> Node:
        shown = storage(node)
        return same.get(shown, shown)

    last: dict[Node, int] = {}
    for position, step in enumerate(steps):
        for node in step.reads:
            last[home(node)] = position
    for node in results:
        last[home(node)] = len(steps)
    alive: dict[Node, int] = {}
    total = 0

    def end(nodes: Iterable[Node]) -> None:
        nonlocal total
        total -= sum(alive.pop(node, 0) for node in nodes)

    def begin(nodes: Iterable[Node]) -> None:
        nonlocal total
        for node in nodes:
            end([node])
            alive[node] = calls.nbytes(node)
            total += alive[node]

    begin(map(home, inputs))
    unread = [node for node in alive if node not in last]
    dying: dict[int, list[Node]] = {}
    for node, position in last.items():
        dying.setdefault(position, []).append(node)
    points: list[int] = []
    for position, step in enumerate(steps):
        end(map(home, step.replaces))
        begin(node for node in step.makes if home(node) is node)
        points.append(total + step.scratch)
        end(dying.get(position, ()))
        end(node for node in (*step.makes, *unread) if node not in last)
        unread = []
    return points


def storage(node: Node) -> Node:
    """The node in whose storage `node` lies: a view's base, or the operand that an operator overwrites and returns."""
    return calls.through(node, lambda call: calls.is_view(call) or calls.gives_operand(call))


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
