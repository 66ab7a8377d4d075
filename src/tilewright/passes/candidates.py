"""Hand-written kernels in place of the operators that they stand for, where they are predicted to be faster.

    y = _log_softmax(x, 1); loss = nll_loss_forward(y, t, …)     →   loss = cross_entropy(x, t, …)

Each kernel declares its pattern, limits and time (`kernels/<operator>/candidate.py`). What it replaces is priced with
its neighbours, as fusion would join them, and without: a kernel wins only where the whole comes out faster. Matched on
the joint graph, before the cut, since what is saved for backward follows from it. Each match leaves a `Decision`.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from tilewright.graph.source import source_line
from tilewright.hardware.profiles import DeviceProfile
from tilewright.hardware.target import Target
from tilewright.kernels.candidate import Candidate, Offer
from tilewright.kernels.cross_entropy.candidate import CANDIDATE as CROSS_ENTROPY
from tilewright.passes.generated import Groups
from tilewright.passes.units import behind_views
from tilewright.records.program import Decision, Verdict

CANDIDATES = (CROSS_ENTROPY,)
CLEAR = 0.95
"""Predicted times that are nearer to each other than this say nothing: the generated kernel stays."""


def choose_candidates(graph: fx.Graph, target: Target, candidates: Iterable[Candidate] = CANDIDATES) -> list[Decision]:
    """Rewrite `graph`, a joint or inference graph of ATen operators, in place; a decision for each match."""
    groups = Groups(graph)
    decisions: list[Decision] = []
    for candidate in candidates:
        for node in [node for node in graph.nodes if str(node.target) in candidate.roots]:
            offer = candidate.offer(node, target)
            if offer is not None:
                decisions.append(_decide(node, candidate, offer, groups, target.profile))
    return decisions


def _decide(node: fx.Node, candidate: Candidate, offer: Offer, groups: Groups, profile: DeviceProfile) -> Decision:
    producer = behind_views(offer.replaces[0].all_input_nodes[0]).name
    source, consumer, predicted = source_line(node), node.name, None
    verdict: Verdict = "refused"
    if offer.refusal is not None:
        reason = f"{candidate.kernel} does not take {candidate.stands_for}: {offer.refusal}"
    else:
        ours = sum(work.predicted_us(profile) for work in offer.work)
        beside = groups.around(offer.replaces)
        with_it = ours + groups.predicted_us(beside - set(offer.replaces), profile)
        without = groups.predicted_us(beside, profile)
        predicted, faster = ours, with_it < without * CLEAR
        reason = (
            f"{candidate.kernel} in place of {candidate.stands_for}: {with_it:.0f} µs predicted with what is beside "
            f"it, {without:.0f} µs as generated kernels and library calls"
        )
        if faster:
            verdict, consumer = "taken", offer.apply().name
    return Decision(
        "forward", producer, consumer, verdict, reason, predicted_us=predicted, source=source, passed_by="candidates"
    )
