"""Decides which proposed fusions stay: by prediction or, if that is too close, by a race on this machine.

The fusion pass assumes that moving fewer bytes is faster. If the target measures, a region whose predicted time is
close to that of its operators one by one is raced against them, and the outcome is kept: every later compilation of the
same nest, in any process, follows it. A region that lost is split into its operators, and its decisions become "tried
and lost".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.choose.chooser import is_close, is_faster
from tilewright.choose.region_race import APART, FUSED, race_regions
from tilewright.cost.kinds import region_work
from tilewright.cost.work import predicted_us
from tilewright.hardware.target import Target
from tilewright.launch.race import race_key
from tilewright.loops.nest import describe, nameless
from tilewright.passes.fusion import COPIED, Fusion, Region, split_region
from tilewright.passes.units import readers
from tilewright.records import outcomes
from tilewright.records.outcomes import Outcome
from tilewright.records.program import Decision

MADE_FROM = ("emit", "loops", "runtime/compiler.py")


def settle(fusion: Fusion, target: Target) -> Fusion:
    """`fusion` with the regions that lost a race split into their operators."""
    several = [r for r in fusion.regions if len(r.members) > 1 and _is_here(r)]
    if target.measures:
        unknown = [(r, parts) for r in several if _kept(r) is None and (parts := split_region(r)) is not None]
        close = [(region, parts) for region, parts in unknown if _is_close(region, parts, target)]
        for (region, _), outcome in zip(close, race_regions(close) if close else [], strict=True):
            outcomes.keep(_key(region), outcome)
    raced = {region: known for region in several if (known := _kept(region)) is not None}
    return replace(
        fusion,
        regions=[part for region in fusion.regions for part in _follow(region, raced.get(region))],
        decisions=[_annotate(decision, raced) for decision in fusion.decisions],
    )


def are_copies_apart(fusion: Fusion) -> bool:
    """Whether a call that was copied for the kernel that reads it is in another kernel."""
    region_of = {member: region for region in fusion.regions for member in region.members}
    copies = [member for member in region_of if member.meta.get(COPIED)]
    return any(region_of.get(reader) is not region_of[copy] for copy in copies for reader in readers(copy))


def faster(plain: Fusion, copies_first: Fusion, target: Target) -> Fusion:
    """The one whose kernels are predicted to take less time; `plain` if the other computes copies in transposing
    kernels, which take up to eight times as long as predicted where they read several values for each element."""
    if any(r.lowered.nest.transposes and any(n.meta.get(COPIED) for n in r.members) for r in copies_first.regions):
        return plain
    return min(plain, copies_first, key=lambda fusion: _predicted_us(fusion, target))


def _predicted_us(fusion: Fusion, target: Target) -> float:
    return sum(predicted_us(region_work(region.lowered), target.profile) for region in fusion.regions)


def _is_here(region: Region) -> bool:
    """Whether its kernel runs on a device of this machine."""
    return region.device.type == "cuda" or region.language == "c++"


def _is_close(region: Region, parts: Sequence[Region], target: Target) -> bool:
    return is_close([region_work(region.lowered)], [region_work(part.lowered) for part in parts], target.profile)


def _stays_fused(outcome: Outcome) -> bool:
    return is_faster(outcome.us(FUSED), outcome.us(APART), raced=True)


def _follow(region: Region, outcome: Outcome | None) -> Sequence[Region]:
    if outcome is None or _stays_fused(outcome):
        return [region]
    return split_region(region) or [region]


def _annotate(decision: Decision, raced: dict[Region, Outcome]) -> Decision:
    for region, outcome in raced.items():
        names = {node.name for node in region.members}
        if decision.verdict == "taken" and {decision.producer, decision.consumer} <= names:
            fused_us, apart_us = outcome.times_us[FUSED], outcome.times_us.get(APART)
            if apart_us is None or _stays_fused(outcome):
                return replace(decision, measured_us=fused_us)
            reason = f"one kernel took {fused_us:.0f} µs, one each {apart_us:.0f} µs"
            return replace(decision, verdict="tried and lost", reason=reason, bytes_saved=0, measured_us=fused_us)
    return decision


def _kept(region: Region) -> Outcome | None:
    return outcomes.lookup(_key(region))


def _key(region: Region) -> str:
    """The key of a race of the nest, whatever its names."""
    return race_key(("region", describe(nameless(region.lowered.nest))), region.device, MADE_FROM)
