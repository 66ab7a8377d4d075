"""Replaces operators by hand-written kernels where these are predicted to be faster.

    y = _log_softmax(x, 1); loss = nll_loss_forward(y, t, …)     →   loss = cross_entropy(x, t, …)

Each kernel declares its pattern, limits and time (`kernels/<operator>/candidate.py`). The pass prices the operators
that the kernel replaces and their neighbours, grouped as fusion would group them, with the kernel and without it, and
takes the kernel only if the whole is faster. It runs on the joint graph, since the choice decides what is saved for
backward. Each match leaves a `Decision`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from tilewright.cost.work import predicted_us
from tilewright.graph import calls
from tilewright.hardware.profiles import DeviceProfile
from tilewright.hardware.target import Target
from tilewright.kernels.candidate import Candidate, Offer
from tilewright.kernels.cross_entropy.candidate import CANDIDATE as CROSS_ENTROPY
from tilewright.kernels.linear.candidate import CANDIDATE as LINEAR_GELU
from tilewright.kernels.norm.candidate import CANDIDATE as NORM
from tilewright.kernels.softmax.candidate import CANDIDATE as SOFTMAX
from tilewright.passes.casts import drop_round_trips
from tilewright.passes.generated import Groups
from tilewright.passes.rule import undecided
from tilewright.passes.simplify import drop_unread
from tilewright.records.program import Decision

CANDIDATES = (CROSS_ENTROPY, NORM, SOFTMAX, LINEAR_GELU)
CLEAR = 0.98
"""A hand-written kernel is taken if the predicted time with it is below this share of the time without it."""


def choose_candidates(graph: fx.Graph, target: Target) -> list[Decision]:
    """Rewrite `graph`, a joint or inference graph of ATen operators, in place; a decision for each match."""
    groups = Groups(graph)
    decisions: list[Decision] = []
    for candidate in CANDIDATES:
        for node in [n for n in graph.nodes if str(n.target) in candidate.roots and _sizes_are_known(n)]:
            if offers := candidate.offers(node, target, groups.backward):
                decision = _decide(node, candidate, offers, groups, target)
                decisions.append(decision)
                if decision.verdict == "taken":
                    drop_unread(graph)
                    groups = Groups(graph)
    if any(decision.verdict == "taken" for decision in decisions):
        drop_round_trips(graph)
        drop_unread(graph)
    return decisions


def _sizes_are_known(node: fx.Node) -> bool:
    """Whether no size of the operands and results depends on data; sizes that change between calls have a hint."""
    tensors = [value for one in (node, *node.all_input_nodes) for value in calls.results(one)]
    return all(calls.is_known(size) for value in tensors for size in value.shape)


def _decide(node: fx.Node, candidate: Candidate, offers: Sequence[Offer], groups: Groups, target: Target) -> Decision:
    here = undecided(node, "candidates")
    possible = [offer for offer in offers if offer.refusal is None]
    if not possible:
        return replace(here, reason=f"{candidate.kernel} does not take {candidate.stands_for}: {offers[0].refusal}")
    best = max((_Priced(offer, groups, target.profile) for offer in possible), key=lambda priced: priced.gain_us)
    reason = (
        f"{candidate.kernel} in place of {candidate.stands_for}: {best.with_us:.1f} µs predicted with what "
        f"is beside it, {best.without_us:.1f} µs as generated kernels and library calls"
    )
    here = replace(here, reason=reason, predicted_us=best.kernel_us)
    is_faster = best.with_us < best.without_us * CLEAR
    return replace(here, verdict="taken", consumer=best.offer.apply().name) if is_faster else here


class _Priced:
    """An offer, with the predicted time of the affected operators with it and without it."""

    def __init__(self, offer: Offer, groups: Groups, profile: DeviceProfile) -> None:
        self.offer = offer
        beside = groups.around(offer.replaces)
        self.kernel_us = sum(predicted_us(work, profile) for work in offer.work)
        self.with_us = self.kernel_us + groups.predicted_us(beside - set(offer.replaces), profile)
        spared = sum(predicted_us(work, profile, with_start=False) for work in offer.spared)
        self.without_us = groups.predicted_us(beside, profile) + spared

    @property
    def gain_us(self) -> float:
        return self.without_us - self.with_us
