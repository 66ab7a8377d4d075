"""The declaration with which a hand-written kernel can replace ATen operators in a compiled program.

Each folder that has such a kernel has a `candidate.py` with one `Candidate`; `passes/candidates.py` proposes them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.cost.work import Work

if TYPE_CHECKING:
    from torch.fx import Node

    from tilewright.hardware.target import Target


@dataclass(frozen=True)
class Offer:
    """A hand-written kernel in place of some operators of one graph."""

    replaces: tuple[Node, ...]
    """The operators that it computes, forward and backward."""
    work: tuple[Work, ...]
    """Its launches, forward and backward."""
    apply: Callable[[], Node]
    """Rewrites the graph; gives the forward's call. Operators without readers may stay."""
    refusal: str | None = None
    """Why the kernel does not support these operands or this target; None if it does."""
    spared: tuple[Work, ...] = ()
    """Work of generated kernels that it saves beside the operators it replaces; launches are not counted."""


@dataclass(frozen=True)
class Candidate:
    """The pattern that a hand-written kernel replaces."""

    kernel: str
    """`tilewright.cross_entropy`, as in the operator table."""
    stands_for: str
    """In words, for a decision's reason: `log_softmax and nll_loss`."""
    roots: frozenset[str]
    """The operators at which a match begins, by full name."""
    offers: Callable[[Node, Target, Container[Node]], Sequence[Offer]]
    """The offers for a match at a node; empty if there is none. The last argument has the nodes that depend on incoming
    gradients."""
