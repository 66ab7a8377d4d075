"""What an implementation offers to the compiler: to compute some calls of a graph in place of what runs there now.

An offer is data beside the function that writes it into the graph; `choose/chooser.py` prices it and decides. A folder
of `kernels/` whose kernel compiled programs should use has an `offer.py` with one `Candidate`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.cost.work import Work
from tilewright.graph import calls
from tilewright.graph.insert import insert_again

if TYPE_CHECKING:
    from torch.fx import Node

    from tilewright.hardware.target import Target
    from tilewright.launch.race import Race

CLEAR = 0.98
"""By this share a predicted offer must be faster, and a raced one must not be slower, so that noise decides nothing."""
OURS, THEIRS = "tilewright", "as it is"
"""How the names of a race's alternatives begin, with the offer and without it."""


@dataclass(frozen=True)
class Offer:
    """One way to compute some calls. An offer without work and without races is always faster where it is possible."""

    kernel: str
    """What computes them, in words or as in the operator table: `tilewright.cross_entropy`."""
    stands_for: str
    """What it takes the place of, in words: `log_softmax and nll_loss`."""
    node: Node
    """The call that the decision is about."""
    apply: Callable[[], Node]
    """Rewrites the graph; gives the new call. Calls without readers may stay."""
    refusal: str | None = None
    """Why it is not possible for these operands or on this target."""
    replaces: tuple[Node, ...] = ()
    """The calls that it computes, forward and backward: what they take with their neighbours is the time without it."""
    work: tuple[Work | float, ...] = ()
    """Its launches, forward and backward; a number is predicted microseconds of what has no kind in the fit. Not read
    where it is raced."""
    instead: tuple[Work | float, ...] = ()
    """The launches without it, if these do not depend on neighbours."""
    spared: tuple[Work, ...] = ()
    """Work of generated kernels that it saves beside the calls it replaces; launches are not counted."""
    beside: tuple[Work | float, ...] = ()
    """Launches that it takes beside what is raced."""
    saves: tuple[Work | float, ...] = ()
    """Launches that it makes needless beside what is raced."""
    races: tuple[Race, ...] = ()
    """What is raced rather than predicted: the times of `ways` and of `THEIRS` add up."""
    ways: tuple[str, ...] = ()
    """Which alternative of each race the offer is; `OURS` of all if empty."""
    unraced: str | None = None
    """Why it is not taken without a race on this device."""
    with_backward: bool = False
    """Whether the races have the backward in them."""
    clear: float = CLEAR
    least_us: float = 0.0
    """The least predicted gain."""
    producer: Node | None = None
    """The operand that the decision names, if that is not the first."""


@dataclass(frozen=True)
class Candidate:
    """The pattern that a hand-written kernel replaces."""

    roots: frozenset[str]
    """The operators at which a match begins, by full name."""
    offers: Callable[[Node, Target, Container[Node]], Sequence[Offer]]
    """The offers for a match at a node; empty if there is none. The last argument has the nodes that depend on incoming
    gradients."""


def is_late(reader: Node, waiting: Container[Node]) -> bool:
    """Whether `reader` runs in backward: it is among the nodes that wait for gradients."""
    return reader.op != "output" and reader in waiting


def hand_late(old: Node, new: Node, waiting: Container[Node]) -> None:
    """Let the readers of `old` in backward read `new` instead, through new views where they read views."""
    for user in list(old.users):
        if is_late(user, waiting):
            user.replace_input_with(old, new)
        elif calls.is_view(user) and any(is_late(reader, waiting) for reader in calls.readers(user)):
            hand_late(user, insert_again(user, user, new), waiting)
