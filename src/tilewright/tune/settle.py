"""Decides which proposed fusions stay: by prediction or, if that is too close, by a race on this machine.

The fusion pass assumes that moving fewer bytes is faster. With `measure=True`, a region whose predicted time is within
a factor of `CLEAR_FACTOR` of that of its operators one by one is raced against them, and the outcome is kept: every
later compilation of the same nest, in any process, follows it. A region that lost is split into its operators, and its
decisions become "tried and lost".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.cost.kinds import region_work
from tilewright.cost.work import is_fitted, predicted_us
from tilewright.hardware.profiles import DeviceProfile
from tilewright.hardware.target import Target
from tilewright.launch.race_key import race_key
from tilewright.loops.nest import describe, nameless
from tilewright.passes.fusion import Fusion, Region, split_region
from tilewright.records import outcomes
from tilewright.records.outcomes import Outcome
from tilewright.records.program import Decision
from tilewright.tune.regions import APART, FUSED, race_regions

MADE_FROM = ("emit", "loops", "runtime/compiler.py")
CLEAR_FACTOR = 1.5
"""If predicted times of generated kernels differ by more than this factor, the prediction decides."""


def settle(fusion: Fusion, target: Target, *, measure: bool) -> Fusion:
    """`fusion` with the regions that lost a race split into their operators."""
    several = [r for r in fusion.regions if len(r.members) > 1 and _is_here(r)]
    if measure:
        unknown = [(r, parts) for r in several if _kept(r) is None and (parts := split_region(r)) is not None]
        close = _close(unknown, target.profile) if unknown else []
        for (region, _), outcome in zip(close, race_regions(close) if close else [], strict=True):
            outcomes.keep(_key(region), outcome)
    raced = {region: known for region in several if (known := _kept(region)) is not None}
    return replace(
        fusion,
        regions=[part for region in fusion.regions for part in _follow(region, raced.get(region))],
        decisions=[_annotate(decision, raced) for decision in fusion.decisions],
    )


def _is_here(region: Region) -> bool:
    """Whether its kernel runs on a device of this machine."""
    return region.device.type == "cuda" or region.language == "c++"


def _close(
    pairs: Sequence[tuple[Region, Sequence[Region]]], profile: DeviceProfile
) -> list[tuple[Region, Sequence[Region]]]:
    """The pairs for which prediction cannot decide whether the region or its parts are faster."""

    def is_close(region: Region, parts: Sequence[Region]) -> bool:
        works = [region_work(one.lowered) for one in (region, *parts)]
        whole, *split = (predicted_us(work, profile) for work in works)
        fitted = all(is_fitted(work, profile) for work in works)
        return not fitted or max(whole, sum(split)) < CLEAR_FACTOR * min(whole, sum(split))

    return [(region, parts) for region, parts in pairs if is_close(region, parts)]


def _follow(region: Region, outcome: Outcome | None) -> Sequence[Region]:
    if outcome is None or outcome.fastest == FUSED:
        return [region]
    return split_region(region) or [region]


def _annotate(decision: Decision, raced: dict[Region, Outcome]) -> Decision:
    for region, outcome in raced.items():
        names = {node.name for node in region.members}
        if decision.verdict == "taken" and {decision.producer, decision.consumer} <= names:
            fused_us, apart_us = outcome.times_us[FUSED], outcome.times_us.get(APART)
            if apart_us is None or outcome.fastest == FUSED:
                return replace(decision, measured_us=fused_us)
            reason = f"one kernel took {fused_us:.0f} µs, one each {apart_us:.0f} µs"
            return replace(decision, verdict="tried and lost", reason=reason, bytes_saved=0, measured_us=fused_us)
    return decision


def _kept(region: Region) -> Outcome | None:
    return outcomes.lookup(_key(region))


def _key(region: Region) -> str:
    """The key of a race of the nest, whatever its names."""
    return race_key(("region", describe(nameless(region.lowered.nest))), region.device, MADE_FROM)
