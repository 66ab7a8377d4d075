"""Which proposed fusions stay: by prediction, unless a measurement on this machine says otherwise.

The fusion pass predicts that moving fewer bytes is faster. `settle` with `measure=True` races each
region against its operators one by one and keeps the outcome on disk; every later compilation of
the same nest, in any process, follows it. A region that lost is taken apart, and its pairs are
marked "tried and lost".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tilewright.emit.source import language_of
from tilewright.loops.nest import Nest, describe
from tilewright.passes.fusion import Fusion, Region, apart
from tilewright.records import cache
from tilewright.records.program import Decision
from tilewright.tune.kept import keep, kept
from tilewright.tune.trial import Trial, race


def settle(fusion: Fusion, *, measure: bool) -> Fusion:
    """`fusion` with the regions that measurement refuted taken apart."""
    several = [r for r in fusion.regions if len(r.members) > 1 and language_of(r.device) == "c++"]
    if measure:
        unknown = [(r, parts) for r in several if _kept(r) is None and (parts := apart(r)) is not None]
        for (region, _), trial in zip(unknown, race(unknown) if unknown else [], strict=True):
            keep(_key(region.lowered.nest), trial)
    trials = {region: known for region in several if (known := _kept(region)) is not None}
    return replace(
        fusion,
        regions=[part for region in fusion.regions for part in _follow(region, trials.get(region))],
        decisions=[_annotate(decision, trials) for decision in fusion.decisions],
    )


def _follow(region: Region, trial: Trial | None) -> Sequence[Region]:
    if trial is None or trial.fusion_wins:
        return [region]
    return apart(region) or [region]


def _annotate(decision: Decision, trials: dict[Region, Trial]) -> Decision:
    for region, trial in trials.items():
        names = {node.name for node in region.members}
        if decision.verdict == "taken" and {decision.producer, decision.consumer} <= names:
            if trial.fusion_wins:
                return replace(decision, measured_us=trial.fused_us)
            reason = f"one kernel took {trial.fused_us:.0f} µs, one each {trial.separate_us:.0f} µs"
            return replace(decision, verdict="tried and lost", reason=reason, bytes_saved=0, measured_us=trial.fused_us)
    return decision


def _kept(region: Region) -> Trial | None:
    return kept(_key(region.lowered.nest))


def _key(nest: Nest) -> str:
    """What the nest computes, and where."""
    nameless = replace(
        nest,
        name="",
        inputs=tuple(replace(b, name="") for b in nest.inputs),
        outputs=tuple(replace(b, name="") for b in nest.outputs),
    )
    instructions = torch.backends.cpu.get_cpu_capability()
    return cache.key_of("trial", describe(nameless), str(torch.get_num_threads()), instructions, torch.__version__)
