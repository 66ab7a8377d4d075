"""A race: implementations of one workload, timed interleaved on fresh inputs and compared with float64.

Four checks exclude cheats in general rather than one by one. Each call gets new random values, in memory that
held NaN before. Its results are overwritten as soon as they were inspected. Two of the timed calls, one of them
at random, are compared with float64 after timing. All streams must be idle when the call's own stream is.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf

import torch

from tilewright.measure.memory import peak_bytes
from tilewright.measure.racing.arguments import Arguments, poison_free_memory, poison_freed_heap
from tilewright.measure.racing.candidate import InvalidRun, RacedVariant
from tilewright.measure.timing import timers
from tilewright.measure.timing.benchmark import WARM_UP, Timing, interleaved
from tilewright.measure.timing.gpu_state import persisting_bytes, read_sm_clock, set_persisting_bytes, throttled
from tilewright.measure.timing.stopwatch import CudaStopwatch, Lap, Stopwatch, stopwatch_for
from tilewright.measure.truth.contract import told_apart
from tilewright.measure.truth.proof import RunOutput, truth_of
from tilewright.pytorch.compiler import buffers_kept, forget_compiled
from tilewright.records.measurement import Direction, Verified
from tilewright.records.suite import Suite, Variant, Workload

LATE_US = 100.0
"""A device busy for longer than this after a call runs work of that call; shorter times are host jitter."""
LATE = 0.01
"""The same for long calls, as a share of their time: the host's wake-up takes longer after a long wait."""
BUSY = 1.1
"""The profiler's kernel time may exceed the event time by this factor: clock rates differ between the two runs."""
BUSY_US = 20.0
OUTSIDE_US = 0.5
"""Shorter work on another stream is ignored: the records of two consecutive kernels may overlap for this long."""
_PROFILES = 3
"""Profiles taken before a call is rejected: at its power limit a device may run one of them 10 % slower."""
_LONGEST_HOST_US = 20_000.0
"""Calls with a longer host time (a Python loop of launches) have too many kernels for a profile."""
_POISONED = 4
"""Free memory filled with NaN before an inspected call, as a multiple of the arguments' bytes."""


@dataclass
class VariantResult:
    """The result of one implementation in a race. With a `refusal` it has no timing."""

    impl: str
    timing: Timing | None = None
    verified: Sequence[Verified] = ()
    peak_bytes: int | None = None
    refusal: str | None = None
    invalid: bool = False
    """Refused because it was wrong or cheated."""
    failed: bool = False
    """Refused because it raised an exception."""
    notes: list[str] = field(default_factory=list)

    @property
    def worst(self) -> Verified | None:
        """The tensor with the largest error."""
        return max(self.verified, key=lambda row: row.error, default=None)


@dataclass(frozen=True)
class Race:
    """A workload of a suite in one direction on a device; timing takes at most `seconds`."""

    suite: Suite
    workload: Workload
    direction: Direction
    device: str = "cpu"
    seconds: float = 3.0
    min_repeats: int = 10
    tolerance: float = 0.005

    def run(
        self, variants: Sequence[Variant], *, probes: Mapping[str, Callable[[], object]] | None = None
    ) -> tuple[list[VariantResult], dict[str, Timing]]:
        """The outcome of each variant, and the timings of the `probes`: calls that measure the ceilings.

        A variant that does not support the workload, fails, or cheats has an outcome with a `refusal`.
        """
        timers.cuda_timers()
        forget_compiled()
        with _own_generators(self.device):
            return _Running(self, variants, probes or {}).finish()


class _Running:
    """The state of one race."""

    def __init__(self, race: Race, variants: Sequence[Variant], probes: Mapping[str, Callable[[], object]]) -> None:
        self.race = race
        self.watch: Stopwatch = stopwatch_for(race.device)
        self.arguments = Arguments(race.workload, race.device)
        self.variants = {variant.name: variant for variant in variants}
        self.outcomes = {variant.name: VariantResult(variant.name) for variant in variants}
        self.candidates = {v.name: RacedVariant(v, race.direction, self.arguments, self.watch) for v in variants}
        self.probes = {f"probes {name}": partial(self._probe, call) for name, call in probes.items()}
        self.persisting = persisting_bytes()
        self.inspected: dict[int, dict[str, RunOutput]] = {}
        self.secret_round = secrets.randbelow(race.min_repeats)

    def finish(self) -> tuple[list[VariantResult], dict[str, Timing]]:
        for name in list(self.candidates):
            refused = self.candidates[name].variant.refuses(self.race.workload)
            if refused:
                self._refuse(name, refused, invalid=False)
            else:
                self._try(name, partial(self._enter, name))
        clock = read_sm_clock(self.race.device)
        timings = self._rounds()
        for name, timing in timings.items():
            if name in self.candidates:
                self.outcomes[name].timing = timing
        slower = throttled(clock, read_sm_clock(self.race.device))
        for name in list(self.candidates):
            self._try(name, partial(self._other_clocks, name, timings))
            self.outcomes[name].notes += [slower] if slower else []
        for name in list(self.candidates):
            self._try(name, partial(self._inspect, name, timings[name].repeats))
        self._prove()
        return list(self.outcomes.values()), {
            name.removeprefix("probes "): timing for name, timing in timings.items() if name in self.probes
        }

    def _try(self, name: str, step: Callable[[], object]) -> None:
        """Run a step; if it fails, remove the implementation from the race."""
        try:
            step()
        except Exception as error:
            invalid = isinstance(error, InvalidRun)
            self.outcomes[name].failed = not invalid
            self._refuse(name, str(error) if invalid else _in_a_line(error), invalid)

    def _refuse(self, name: str, why: str, invalid: bool) -> None:
        outcome = self.outcomes[name]
        if outcome.refusal is None:
            outcome.refusal, outcome.invalid, outcome.timing = why, invalid, None
        self.candidates.pop(name, None)

    def _enter(self, name: str) -> None:
        """The first call, in which an implementation compiles, and an inspected one."""
        self.candidates[name].call(WARM_UP)
        self._inspect(name, WARM_UP)

    def _rounds(self) -> dict[str, Timing]:
        calls: dict[str, Callable[[int], Lap]] = dict(self.probes)
        calls |= {name: partial(self._lap, name) for name in self.candidates}
        if not self.candidates:
            return {}
        race = self.race
        return interleaved(
            calls, self.watch.now, min_repeats=race.min_repeats, max_seconds=race.seconds, tolerance=race.tolerance
        )

    def _probe(self, call: Callable[[], object], _: int) -> Lap:
        return self.watch.time(call)

    def _lap(self, name: str, number: int) -> Lap:
        if name not in self.candidates:
            return Lap(0.0)
        step = self._inspect if number == self.secret_round else self._call
        laps: list[Lap] = []
        self._try(name, lambda: laps.append(step(name, number)))
        return laps[0] if laps else Lap(0.0)

    def _call(self, name: str, number: int) -> Lap:
        return self.candidates[name].call(number)

    def _inspect(self, name: str, number: int) -> Lap:
        """A timed call that must not change its inputs and whose results are kept to compare with float64.

        One comes before the rounds, one is a random round, and one comes last.
        """
        candidate = self.candidates[name]
        kept: list[RunOutput] = []

        def inspect(returned: object) -> None:
            results = candidate.results(returned)
            self._check(results)
            kept.append(
                RunOutput(
                    [t.detach().clone() for t in results.outputs], [t.detach().clone() for t in results.gradients]
                )
            )
            if not candidate.variant.overwrites_inputs and not self.arguments.intact():
                raise InvalidRun("it overwrites its inputs")

        # Not during the rounds: the driver clears released memory, which slows the next calls.
        if isinstance(self.watch, CudaStopwatch) and number != self.secret_round:
            poison_free_memory(_POISONED * self.arguments.nbytes, self.race.device)
        above = poison_freed_heap(self.arguments.nbytes) if self.race.device == "cpu" else None
        lap = candidate.call(number, inspect)
        del above
        self._check_surroundings()
        if number != WARM_UP:
            self.inspected.setdefault(number, {})[name] = kept[0]
        return lap

    def _check(self, results: RunOutput) -> None:
        """Raise unless all results are plain tensors on the device that share no memory with the arguments."""
        for tensor in (*results.outputs, *results.gradients):
            if type(tensor) is not torch.Tensor:
                raise InvalidRun(
                    f"it returned a {type(tensor).__name__}, which may compute lazily, instead of a tensor"
                )
            if tensor.device.type != torch.device(self.race.device).type:
                raise InvalidRun(f"its result is on {tensor.device}, not on {self.race.device}")
        if self.arguments.aliased_by(results.outputs):
            raise InvalidRun("its result shares memory with its input")

    def _check_surroundings(self) -> None:
        """Raise if the clocks were replaced, or part of L2 was reserved for lines that a flush does not evict."""
        changed = timers.replaced()
        if changed:
            raise InvalidRun(f"it replaced {', '.join(changed)}")
        kept = persisting_bytes()
        if kept != self.persisting:
            set_persisting_bytes(self.persisting)
            raise InvalidRun(f"it reserves {kept} bytes of L2 that a flush does not evict")

    def _other_clocks(self, name: str, timings: Mapping[str, Timing]) -> None:
        """Peak memory, the times by other clocks, and checks over all calls of the race."""
        candidate, outcome, timing = self.candidates[name], self.outcomes[name], timings[name]
        last = timing.repeats
        with torch.set_grad_enabled(candidate.trains):
            outcome.peak_bytes = peak_bytes(candidate.ready(last), self.race.device)
            if isinstance(self.watch, CudaStopwatch):
                outcome.notes += self._crosschecked(candidate, timing, last, self.watch)
        outcome.notes += _said_by(candidate.variant)
        if not timing.converged:
            outcome.notes.append("times still varied widely when the seconds were over")
        late_us = timing.late_us - min(other.late_us for other in timings.values())
        if late_us > max(LATE_US, LATE * timing.median_us):
            raise InvalidRun(f"other streams were busy for {late_us:.0f} µs after it had ended")

    def _crosschecked(self, candidate: RacedVariant, timing: Timing, number: int, watch: CudaStopwatch) -> list[str]:
        """Time the call by the profiler too; raise InvalidRun if the device did work that the events did not cover."""
        from tilewright.measure.timing.crosscheck import clock_overhead_us, disagreement, profile

        if candidate.lead_us > _LONGEST_HOST_US:
            return [f"host time above {_LONGEST_HOST_US / 1e3:.0f} ms: not timed by the profiler"]
        overhead_us = clock_overhead_us(self.race.device)
        if overhead_us is None:
            return []
        most_us = BUSY * timing.median_us + BUSY_US
        for _ in range(_PROFILES):
            profiled = profile(partial(candidate.ready, number), watch, candidate.lead_us)
            if profiled is None or profiled.busy_us <= most_us:
                break
        if profiled is None:
            return []
        if profiled.outside_us > OUTSIDE_US:
            raise InvalidRun(
                f"{profiled.outside_us:.1f} µs of its work ran on another stream before or after the call's own part"
            )
        if profiled.busy_us > most_us:
            raise InvalidRun(
                f"its kernels ran {profiled.busy_us:.0f} µs, the events on its stream say {timing.median_us:.0f}"
            )
        said = disagreement(timing.median_us, profiled.span_us + overhead_us)
        return [said] if said else []

    def _prove(self) -> None:
        for number, results in sorted(self.inspected.items()):
            inputs, tangent = self.arguments.drawn(number), self.arguments.tangent_of(number)
            backward = self.race.direction in ("bwd", "fwd+bwd")
            seed = self.arguments.seed(number)
            truth = truth_of(self.race.suite, inputs, seed, backward=backward, tangent=tangent)
            for name, result in results.items():
                outcome = self.outcomes[name]
                if self.variants[name].unverified:
                    continue
                outcome.verified = [*outcome.verified, *truth.compare(result)]
                self._check_contract(outcome)
            results.clear()

    def _check_contract(self, outcome: VariantResult) -> None:
        broken = [row for row in outcome.verified if not row.ok]
        if broken:
            worst = max(broken, key=lambda row: row.error)
            error, allowed = told_apart(worst.error, worst.bound)
            largest, largest_allowed = told_apart(worst.max_error, worst.max_bound)
            why = f"is wrong: error {error}, allowed {allowed}; largest {largest}, allowed {largest_allowed}"
            if worst.max_error == inf and worst.max_bound == 0.0:
                why += f"; its shape or dtype ({worst.dtype}) is not eager's"
            self._refuse(outcome.impl, f"{worst.direction} {worst.tensor} {why}", invalid=True)


def _said_by(variant: Variant) -> list[str]:
    """Notes that a variant declares about its figures."""
    notes = ["it overwrites its inputs"] if variant.overwrites_inputs else []
    return [*notes, f"values not checked: {variant.unverified}"] if variant.unverified else notes


def _in_a_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


@contextmanager
def _own_generators(device: str) -> Iterator[None]:
    """Restore the caller's generators afterwards, and let backward run repeatedly on one graph."""
    place = torch.device(device)
    with torch.random.fork_rng([place.index or 0] if place.type == "cuda" else []), buffers_kept():
        yield
