"""Decides between what stands in a graph and what is offered in its place.

    offers for one place → possible? → raced, or predicted with its neighbours → the fastest is written, a decision

What every choice compares is here: kernels that a person wrote, products of libraries on other operands, and layouts of
convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from tilewright.choose.generated import Groups
from tilewright.cost.work import Work, predicted_us
from tilewright.graph.undefined import gradients
from tilewright.hardware.target import FOR_GPUS, Target
from tilewright.kernels.offer import CLEAR, OURS, THEIRS, Offer
from tilewright.passes.rule import undecided
from tilewright.passes.simplify import drop_unread
from tilewright.passes.stage import Rewrite
from tilewright.records.program import Decision, Verdict

Source = Callable[[fx.Graph, Target], Iterable[Sequence[Offer]]]
"""For each place of a graph its offers, the preferred one first. The next place may depend on what was decided."""


def chosen(by: str, source: Source) -> Rewrite:
    """The rewrite that decides on the offers of `source`, whose decisions are `by` it."""

    def run(graph: fx.Graph, target: Target) -> list[Decision]:
        chooser = _Chooser(graph, target, by)
        decisions = [chooser.decide(offers) for offers in source(graph, target)]
        if any(decision.verdict == "taken" for decision in decisions):
            drop_unread(graph)
        return decisions

    return run


def is_faster(ours_us: float, theirs_us: float, *, raced: bool, clear: float = CLEAR, least_us: float = 0.0) -> bool:
    """Whether an alternative is taken: raced, unless the other clearly won; predicted, if it is clearly faster."""
    if raced:
        return clear * ours_us <= theirs_us
    return ours_us < min(clear * theirs_us, theirs_us - least_us)


@dataclass(frozen=True)
class _Priced:
    """An offer with the microseconds of what it affects, with it and without it; `how` is empty for no price."""

    offer: Offer
    how: str = ""
    with_us: float = 0.0
    without_us: float = 0.0
    own_us: float | None = None
    raced: bool = False

    @property
    def refusal(self) -> str | None:
        return self.offer.refusal or (None if self.raced else self.offer.unraced)

    @property
    def reason(self) -> str:
        offer = self.offer
        if self.refusal:
            return f"{offer.kernel} does not replace {offer.stands_for}: {self.refusal}"
        what = f"{offer.kernel} in place of {offer.stands_for}"
        return what + (self.how and f": {self.with_us:.1f} µs {self.how.format(f'{self.without_us:.1f}')}")

    @property
    def is_taken(self) -> bool:
        clear, least = self.offer.clear, self.offer.least_us
        fits = not self.how or is_faster(self.with_us, self.without_us, raced=self.raced, clear=clear, least_us=least)
        return fits and not self.refusal


class _Chooser:
    def __init__(self, graph: fx.Graph, target: Target, by: str) -> None:
        self.graph, self.target, self.by = graph, target, by
        self.groups: Groups | None = None

    @cached_property
    def behind(self) -> set[fx.Node]:
        """What depends on incoming gradients, when the first offer is made."""
        return gradients(self.graph)

    def decide(self, offers: Sequence[Offer]) -> Decision:
        """Take the offer that gains most, if any does; the decision."""
        # Of equal ones the first, and of those that are not possible the first one's reason.
        best = max(map(self._priced, offers), key=lambda one: (not one.refusal, one.without_us - one.with_us))
        offer, is_raced = best.offer, best.raced and not best.refusal
        here = undecided(offer.node, self.by, offer.producer)
        here = replace(here, graph="backward" if offer.node in self.behind else "forward", reason=best.reason)
        if is_raced:
            # What is predicted of a launch is the forward alone.
            here = replace(here, measured_us=None if offer.with_backward else best.with_us)
        elif not best.refusal:
            here = replace(here, predicted_us=best.own_us)
        if not best.is_taken:
            without_race: Verdict = "impossible" if offer.refusal == FOR_GPUS else "refused"
            return replace(here, verdict="tried and lost" if is_raced else without_race)
        self.groups = None
        return replace(here, verdict="taken", consumer=offer.apply().name)

    def _priced(self, offer: Offer) -> _Priced:
        if offer.refusal:
            return _Priced(offer)
        outcomes = [race.outcome(measure=self.target.measures) for race in offer.races]
        times = [outcome for outcome in outcomes if outcome is not None]
        if times and len(times) == len(outcomes):
            ways = offer.ways or (OURS,) * len(times)
            ours = sum(one.us(way) for one, way in zip(times, ways, strict=True))
            theirs = sum(one.us(THEIRS) for one in times) + self._us(offer.saves)
            if math.isinf(ours):
                return _Priced(
                    replace(offer, refusal="its results differ by more than rounding in a race, or it gave none")
                )
            how, beside = f"measured{' forward and backward' if offer.with_backward else ''}", self._us(offer.beside)
            how += f" with {beside:.1f} predicted for copies" if beside else ""
            return _Priced(offer, f"{how}, {{}} µs otherwise", ours + beside, theirs, raced=True)
        if not offer.work:
            return _Priced(offer)
        own_us = self._us(offer.work)
        if offer.instead:
            how, beside, before = "predicted", 0.0, self._us(offer.instead)
        else:
            self.groups = self.groups or Groups(self.graph)
            nodes, profile = self.groups.around(offer.replaces), self.target.profile
            how, before = "predicted for it and the kernels around it", self.groups.predicted_us(nodes, profile)
            beside = self.groups.predicted_us(nodes - set(offer.replaces), profile)
        before += sum(predicted_us(work, self.target.profile, with_start=False) for work in offer.spared)
        how += ", against {} µs for generated kernels and library calls"
        if self.target.is_gpu and not self.target.profile.is_timed:
            how += f", by kernels timed on compute capability {self.target.profile.timed_on}"
        return _Priced(offer, how, own_us + beside, before, own_us)

    def _us(self, work: Iterable[Work | float]) -> float:
        return sum(one if isinstance(one, float) else predicted_us(one, self.target.profile) for one in work)
