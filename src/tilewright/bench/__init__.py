"""`tilewright bench OPERATOR`: races its implementations, verified, beside the measured limit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tilewright.records.errors import UsageError
from tilewright.records.measurement import Direction, Measurement
from tilewright.records.suite_filter import SuiteFilter
from tilewright.report.displayable import Displayable

if TYPE_CHECKING:
    import torch

    from tilewright.measure.racing.ceiling_probe import Limit
    from tilewright.measure.racing.race import VariantResult
    from tilewright.records.suite import Suite, Variant, Workload

_GPU_LANGUAGES = ("triton", "gluon", "cuda")
WORTH = 1.05
"""Speed over the generated kernel that is worth a hand-written one."""
DRAM_NOISE = 1.02
"""A rate above the best of copy, read and write by more than this factor comes from a cache."""


def suite_named(target: str) -> Suite | None:
    """The suite of an operator, or the suite that `file.py:name` names; None if that object is not a suite.

    References to the clocks are taken before the user's file runs. Raises UsageError or TargetError.
    """
    from tilewright.bench.catalogue import suite
    from tilewright.case_names import load_object
    from tilewright.measure.timing.timers import cuda_timers
    from tilewright.records.suite import Suite

    if ":" not in target:
        return suite(target)
    cuda_timers()
    found = load_object(target)
    return found if isinstance(found, Suite) else None


@dataclass(frozen=True)
class RaceResult:
    """The result of one race of a bench: its rows, and each implementation's outcome."""

    suite: Suite
    workload: Workload
    direction: Direction
    rows: Sequence[Measurement]
    outcomes: Sequence[VariantResult]
    limit: float
    """The measured limit that `of_ceiling` is a share of, in `unit`."""
    device: str = "cpu"

    def invalidates(self, row: Measurement) -> bool:
        """Whether an older row belongs to this race and to an implementation that was now invalid."""
        invalid = [outcome.impl for outcome in self.outcomes if outcome.invalid]
        race = (self.suite.name, self.workload.name, self.direction)
        return row.impl in invalid and (row.suite, row.case, row.direction) == race

    @property
    def unit(self) -> str:
        """GB/s, or TFLOP/s if matrix products are the limit."""
        return "TFLOP/s" if self.workload.work[self.direction].limit == "matmul" else "GB/s"

    @property
    def title(self) -> str:
        """Suite, workload, direction and limit."""
        kind = self.workload.work[self.direction].limit
        limit = f"{self.limit:,.0f}" if self.limit >= 100 else f"{self.limit:.3g}"
        return f"{self.suite.name} {self.workload.name} {self.direction} · {kind} {limit} {self.unit}"


def remarks(result: RaceResult) -> list[str]:
    """Why implementations have no row, and the notes of those that have one."""
    notes: dict[str, list[str]] = {}
    for outcome in result.outcomes:
        for note in outcome.notes if outcome.timing else ():
            notes.setdefault(note, []).append(outcome.impl)
    refusals = [_refusal(result, outcome) for outcome in result.outcomes if outcome.refusal]
    return refusals + _worth(result) + [f"{', '.join(impls)}: {note}" for note, impls in notes.items()]


def _worth(result: RaceResult) -> list[str]:
    """Whether tilewright's hand-written kernel wins the 5 % over the generated program that it must; on a GPU only."""
    times = {row.impl: row.median_us for row in result.rows}
    if result.device == "cpu" or result.suite.is_generated or not {"tilewright", "generated"} <= times.keys():
        return []
    speedup = times["generated"] / times["tilewright"]
    if speedup >= WORTH:
        return []
    return [
        f"the hand-written kernel has {speedup:.2f}× the speed of the generated one: {WORTH:.2f}× is what it must win"
    ]


def faults(result: RaceResult) -> list[str]:
    """The reasons for which a bench fails: implementations of tilewright that were invalid or raised.

    Peers count only in a suite without tilewright's implementations, and only if they were invalid.
    """
    ours = [outcome for outcome in result.outcomes if outcome.impl.startswith("tilewright")]
    return [
        _refusal(result, outcome)
        for outcome in ours or result.outcomes
        if outcome.invalid or (outcome.failed and outcome in ours)
    ]


def _refusal(result: RaceResult, outcome: VariantResult) -> str:
    return f"{result.suite.name} {result.workload.name} {result.direction}: {outcome.impl} refused: {outcome.refusal}"


def races(suite: Suite, wanted: SuiteFilter) -> list[tuple[Workload, Direction]]:
    """The races of a suite that `wanted` names, in order; UsageError for a name the suite does not have."""
    known = [variant.name for variant in suite.variants]
    unknown = [name for name in wanted.impls if name not in known]
    if unknown:
        raise UsageError(f"no implementation {', '.join(unknown)} of {suite.name}; known: {', '.join(known)}")
    if wanted.sweep and wanted.sweep not in suite.sweeps:
        raise UsageError(f"{suite.name} has no sweep {wanted.sweep!r}; known: {', '.join(suite.sweeps) or 'none'}")
    sizes = wanted.shapes or (suite.sweeps[wanted.sweep] if wanted.sweep else suite.sizes)
    try:
        workloads = [suite.workload(shape, dtype) for shape in sizes for dtype in wanted.dtypes or suite.dtypes]
    except ValueError as error:
        # A workload unpacks its sizes.
        example = "x".join(map(str, suite.sizes[0]))
        raise UsageError(f"{suite.name} has {len(suite.sizes[0])} sizes, such as {example}") from error
    selected = [
        (workload, direction)
        for workload in workloads
        for direction in workload.work
        if not wanted.directions or direction in wanted.directions
    ]
    if empty := [workload.name for workload, direction in selected if not workload.work[direction].nbytes]:
        raise UsageError(f"{suite.name} {empty[0]} has no elements to move: give sizes of 1 or more")
    first, step = wanted.shard
    return selected[first - 1 :: step]


def bench_suite(
    suite: Suite,
    wanted: SuiteFilter,
    *,
    device: str = "cpu",
    seconds: float = 3.0,
    tell: Callable[[str], None] = lambda _: None,
    done: Callable[[RaceResult], None] = lambda _: None,
) -> list[RaceResult]:
    """Race the implementations of a suite on the chosen workloads; `done` gets each result.

    `seconds` bounds the timing of one race. An implementation that is wrong, cheats or fails has no row;
    its outcome has the reason.
    """
    run: list[RaceResult] = []
    for workload, direction in races(suite, wanted):
        tell(f"{suite.name} {workload.name} {direction}")
        result = _run_race(
            suite, workload, direction, _selected_variants(suite, wanted, direction, device), device, seconds
        )
        run.append(result)
        done(result)
    return run


@dataclass(frozen=True, repr=False)
class Benched(Displayable):
    """The results of races; shows itself in a terminal and in a notebook."""

    races: Sequence[RaceResult]

    def __rich__(self) -> Any:
        from rich.console import Group

        from tilewright.report.bench_table import show_race

        return Group(*(show_race(result.title, result.rows, remarks(result), result.unit) for result in self.races))


def benchmark(
    functions: Mapping[str, Callable[..., Any]],
    *inputs: torch.Tensor,
    reference: Callable[..., Any] | None = None,
    directions: Sequence[Direction] = ("fwd",),
    seconds: float = 3.0,
) -> Benched:
    """Race `functions` by name on inputs of the shapes, dtypes and device of `inputs`, whose values are not used.

    `reference` is the formula in plain PyTorch operators, by default the first function; see `user_suite`.
    Raises UsageError for no function, one without a name, or no input.

    >>> import torch
    >>> x = torch.zeros(64, 32)
    >>> done = benchmark({"double": lambda x: x + x, "twice": lambda x: 2 * x}, x, seconds=0.05)
    >>> sorted(row.impl for row in done.races[0].rows)
    ['double', 'eager', 'twice']
    """
    from tilewright.measure.racing.user_suite import user_suite
    from tilewright.records.case import InputSpec

    if not isinstance(functions, Mapping):
        raise UsageError('a benchmark takes its functions by name: benchmark({"mine": function}, x)')
    if not functions or not inputs:
        raise UsageError("a benchmark needs a function and an input")
    specs = [InputSpec.of(t) for t in inputs]
    suite = user_suite(
        " ".join(functions),
        functions,
        specs,
        reference=reference or next(iter(functions.values())),
        directions=directions,
    )
    return Benched(bench_suite(suite, SuiteFilter(), device=str(inputs[0].device), seconds=seconds))


def _selected_variants(suite: Suite, wanted: SuiteFilter, direction: Direction, device: str) -> list[Variant]:
    """The named variants that have this direction; if none is named, all but those of ours for other devices."""

    def of_gpus(variant: Variant) -> bool:
        return variant.name.startswith("tilewright-") and variant.language in _GPU_LANGUAGES

    def takes(variant: Variant) -> bool:
        chosen = variant.name in wanted.impls if wanted.impls else device != "cpu" or not of_gpus(variant)
        parts = [direction] if direction in variant.directions else direction.split("+")
        return chosen and all(part in variant.directions for part in parts)

    return [
        replace(variant, refuses=lambda _: "its kernel is for GPUs")
        if device == "cpu" and of_gpus(variant)
        else variant
        for variant in suite.variants
        if takes(variant)
    ]


def _run_race(
    suite: Suite, workload: Workload, direction: Direction, variants: list[Variant], device: str, seconds: float
) -> RaceResult:
    from tilewright.measure.racing.ceiling_probe import ceiling_probe
    from tilewright.measure.racing.race import Race

    work = workload.work[direction]
    kinds: set[Limit] = {work.limit, "copy", "read", "write"}
    probes = {kind: ceiling_probe(kind, workload.dtype, device) for kind in sorted(kinds)}
    race = Race(suite, workload, direction, device, seconds)
    outcomes, times = race.run(variants, probes={kind: probe.call for kind, probe in probes.items()})
    rates = {kind: probe.rate(times[kind].median_us) for kind, probe in probes.items() if kind in times}
    dram_GBps = max((rate for kind, rate in rates.items() if kind != "matmul"), default=0.0)
    for outcome in outcomes:
        if outcome.timing:
            _check_rate(outcome, work.nbytes / outcome.timing.median_us / 1e3, dram_GBps, device, work.limit)
    limit = rates.get(work.limit, 0.0)
    return RaceResult(
        suite, workload, direction, _rows(suite, workload, direction, outcomes, limit, device), outcomes, limit, device
    )


def _check_rate(outcome: VariantResult, GBps: float, dram_GBps: float, device: str, limit: Limit) -> None:
    """Note that a cache held the data if the rate is above that of DRAM; refuse a rate above that of L2."""
    if GBps <= DRAM_NOISE * dram_GBps:
        return
    if device == "cpu":
        # The caches of a CPU have no measured ceiling.
        outcome.notes.append("above the bandwidth of memory: a cache of the CPU held the data")
        return
    from tilewright.measure.truth.contract import told_apart

    l2_GBps = _l2_GBps(device, limit)
    if GBps > l2_GBps:
        outcome.invalid, outcome.timing = True, None
        rate, most = told_apart(GBps, l2_GBps, "f", 0)
        outcome.refusal = f"{rate} GB/s is more than L2 was measured to give, {most} GB/s"
    else:
        outcome.notes.append("above the bandwidth of memory: L2 held the data")


@functools.cache
def _device_name(device: str) -> str:
    from tilewright.hardware.ceilings import device_name
    from tilewright.hardware.detect import detect

    return device_name(detect(), device)


def _l2_GBps(device: str, limit: Limit) -> float:
    """The L2 ceiling for work of that limit; reads and writes overlap, so a copy may reach their sum."""
    from tilewright.hardware.ceilings import keep_ceilings, kept_ceilings, measure_ceilings

    ceilings = kept_ceilings(_device_name(device))
    if ceilings is None:
        ceilings = measure_ceilings(device)
        keep_ceilings(ceilings)
    rates = {ceiling.kind: ceiling.value for ceiling in ceilings}
    read, write = rates.get("cache read"), rates.get("cache write")
    if read is None or write is None:
        return rates["cache"]
    return {"read": read, "write": write}.get(limit, read + write)


def _rows(
    suite: Suite, workload: Workload, direction: Direction, outcomes: Sequence[VariantResult], limit: float, device: str
) -> list[Measurement]:
    """A row for each implementation that has a timing; `limit` is in GB/s or TFLOP/s."""
    from tilewright.measure.racing.results import environment, measurement

    work, where = workload.work[direction], environment(_device_name(device))
    # amount / µs is GB/s or TFLOP/s.
    amount = work.flops / 1e6 if work.limit == "matmul" else work.nbytes / 1e3
    return [
        measurement(
            outcome.timing,
            where,
            suite=suite.name,
            case=workload.name,
            impl=outcome.impl,
            direction=direction,
            nbytes=work.nbytes,
            flops=work.flops or None,
            predicted_us=amount / limit,
            peak_bytes=outcome.peak_bytes,
            of_ceiling=amount / outcome.timing.median_us / limit,
            error=outcome.worst.error if outcome.worst else None,
            eager_error=outcome.worst.eager_error if outcome.worst else None,
            note="; ".join(outcome.notes),
            made_from=suite.sources_of(outcome.impl),
            package=suite.variant(outcome.impl).package,
        )
        for outcome in outcomes
        if outcome.timing is not None
    ]
