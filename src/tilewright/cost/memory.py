"""Live memory of a program, step by step: a tensor lives from the step that makes it to its last use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

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
