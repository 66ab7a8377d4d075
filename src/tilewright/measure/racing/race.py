"""A race: the ways of computing one workload, timed side by side on fresh inputs, and proved afterwards.

Nothing here knows a particular cheat. Each call gets values nobody has seen, in memory that held NaN until
the moment before; what it returns is overwritten as soon as it was looked at; two of the very calls that
were timed, chosen in secret, are held against float64 once timing is over; and the device must be idle on
every stream when the call's own stream is.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import torch

from tilewright.measure.memory import peak_bytes
from tilewright.measure.racing.arguments import Arguments, poison_free_memory, poison_freed_heap
from tilewright.measure.racing.entrant import Entrant, Foul
from tilewright.measure.timing import timers
from tilewright.measure.timing.benchmark import WARM_UP, Timing, interleaved
from tilewright.measure.timing.clocks import read_clock, throttled
from tilewright.measure.timing.cold import persisting_bytes, proved_cold, set_persisting_bytes
from tilewright.measure.timing.stopwatch import CudaStopwatch, Lap, Stopwatch, stopwatch_for
from tilewright.measure.truth.proof import Results, truth_of
from tilewright.records.measurement import Direction, Verified
from tilewright.records.suite import Suite, Variant, Workload

LATE_US = 100.0
"""Beyond this, a device that is busy after its call has other work; below, the host's own waits differ so much."""
LATE = 0.01
"""Of a long call's time, likewise: a host that slept through it wakes later."""
BUSY = 1.1
"""Kernels may run so much longer under the profiler than the events say, for clocks drift between the two."""
BUSY_US = 20.0
_LOOKS = 3
"""A device at its power limit may run one profile a tenth slower than the race; a foul shows in all of them."""
_LONGEST_HOST_US = 20_000.0
"""A call that launches thousands of kernels (a loop in Python) would fill a profile and a graph with them."""
_POISONED = 4
"""Times the bytes of the arguments, so much free memory holds NaN before a call that is looked at."""


@dataclass
class Outcome:
    """How one implementation came out of a race. With a `refusal` there is no figure of it."""

    impl: str
    timing: Timing | None = None
    verified: Sequence[Verified] = ()
    peak_bytes: int | None = None
    refusal: str | None = None
    foul: bool = False
    """Refused because it was wrong or cheated, rather than unable to do this workload."""
    failed: bool = False
    """Refused because it raised."""
    notes: list[str] = field(default_factory=list)

    @property
    def worst(self) -> Verified | None:
        """The tensor that is furthest from float64."""
        return max(self.verified, key=lambda row: row.error, default=None)


@dataclass(frozen=True)
class Race:
    """What is raced: a workload of a suite in one direction, on a device, for so many seconds."""

    suite: Suite
    workload: Workload
    direction: Direction
    device: str = "cpu"
    seconds: float = 3.0
    min_repeats: int = 10
    tolerance: float = 0.005

    def run(
        self, variants: Sequence[Variant], *, pace: Mapping[str, Callable[[], object]] | None = None
    ) -> tuple[list[Outcome], dict[str, Timing]]:
        """The outcome of each variant, and the times of the `pace`: calls that set the limit, raced along.

        A variant that refuses the workload, fails, or cheats is an outcome with a `refusal`.
        """
        timers.cuda_timers()
        if self.device != "cpu":
            proved_cold(self.device)
        # Dynamo stops compiling a function after some sizes of it, without a word.
        torch._dynamo.reset()
        with _own_generators(self.device):
            return _Running(self, variants, pace or {}).finish()


class _Running:
    """The state of one race."""

    def __init__(self, race: Race, variants: Sequence[Variant], pace: Mapping[str, Callable[[], object]]) -> None:
        self.race = race
        self.watch: Stopwatch = stopwatch_for(race.device)
        self.arguments = Arguments(race.workload, race.device)
        self.variants = {variant.name: variant for variant in variants}
        self.outcomes = {variant.name: Outcome(variant.name) for variant in variants}
        self.entrants = {v.name: Entrant(v, race.direction, self.arguments, self.watch) for v in variants}
        self.pace = {f"pace {name}": partial(self._paced, call) for name, call in pace.items()}
        self.persisting = persisting_bytes()
        self.looked: dict[int, dict[str, Results]] = {}
        self.secret_round = secrets.randbelow(race.min_repeats)

    def finish(self) -> tuple[list[Outcome], dict[str, Timing]]:
        for name in list(self.entrants):
            refused = self.entrants[name].variant.refuses(self.race.workload)
            if refused:
                self._refuse(name, refused, foul=False)
            else:
                self._try(name, partial(self._enter, name))
        clock = read_clock(self.race.device)
        timings = self._rounds()
        for name, timing in timings.items():
            if name in self.entrants:
                self.outcomes[name].timing = timing
        slower = throttled(clock, read_clock(self.race.device))
        for name in list(self.entrants):
            self._try(name, partial(self._other_clocks, name, timings))
            self.outcomes[name].notes += [slower] if slower else []
        for name in list(self.entrants):
            self._try(name, partial(self._look_at, name, timings[name].repeats))
        self._prove()
        return list(self.outcomes.values()), {
            name.removeprefix("pace "): timing for name, timing in timings.items() if name in self.pace
        }

    def _try(self, name: str, step: Callable[[], object]) -> None:
        """Take an entrant out of the race where the step fails."""
        try:
            step()
        except Exception as error:
            foul = isinstance(error, Foul)
            self.outcomes[name].failed = not foul
            self._refuse(name, str(error) if foul else _in_a_line(error), foul)

    def _refuse(self, name: str, why: str, foul: bool) -> None:
        outcome = self.outcomes[name]
        if outcome.refusal is None:
            outcome.refusal, outcome.foul, outcome.timing = why, foul, None
        self.entrants.pop(name, None)

    def _enter(self, name: str) -> None:
        """The first calls, in which an implementation compiles, and a look at what it returns."""
        self.entrants[name].call(WARM_UP)
        self._look_at(name, WARM_UP)

    def _rounds(self) -> dict[str, Timing]:
        calls: dict[str, Callable[[int], Lap]] = dict(self.pace)
        calls |= {name: partial(self._lap, name) for name in self.entrants}
        if not self.entrants:
            return {}
        race = self.race
        return interleaved(
            calls,
            self.watch.now,
            min_repeats=race.min_repeats,
            max_seconds=race.seconds,
            tolerance=race.tolerance,
        )

    def _paced(self, call: Callable[[], object], _: int) -> Lap:
        return self.watch.time(call)

    def _lap(self, name: str, number: int) -> Lap:
        if name not in self.entrants:
            return Lap(0.0)
        step = self._look_at if number == self.secret_round else self._call
        laps: list[Lap] = []
        self._try(name, lambda: laps.append(step(name, number)))
        return laps[0] if laps else Lap(0.0)

    def _call(self, name: str, number: int) -> Lap:
        return self.entrants[name].call(number)

    def _look_at(self, name: str, number: int) -> Lap:
        """A timed call whose results are kept for the proof, and whose inputs must come out whole.

        The first such call comes before the rounds, one is among them, and one ends the race.
        """
        entrant = self.entrants[name]
        kept: list[Results] = []

        def look(returned: object) -> None:
            results = entrant.results(returned)
            self._check(results)
            kept.append(
                Results([t.detach().clone() for t in results.outputs], [t.detach().clone() for t in results.gradients])
            )
            if not entrant.variant.overwrites_inputs and not self.arguments.intact():
                raise Foul("it writes its inputs")

        # Not amid the rounds: memory given back is cleared by the driver, which slows the calls that follow.
        if isinstance(self.watch, CudaStopwatch) and number != self.secret_round:
            poison_free_memory(_POISONED * self.arguments.nbytes, self.race.device)
        above = poison_freed_heap(self.arguments.nbytes) if self.race.device == "cpu" else None
        lap = entrant.call(number, look)
        del above
        self._check_surroundings()
        if number != WARM_UP:
            self.looked.setdefault(number, {})[name] = kept[0]
        return lap

    def _check(self, results: Results) -> None:
        """Results are plain tensors on the device, of their own memory."""
        for tensor in (*results.outputs, *results.gradients):
            if type(tensor) is not torch.Tensor:
                raise Foul(f"it returned a {type(tensor).__name__}, which may compute later, instead of a tensor")
            if tensor.device.type != torch.device(self.race.device).type:
                raise Foul(f"its result is on {tensor.device}, not on {self.race.device}")
        if self.arguments.aliased_by(results.outputs):
            raise Foul("its result lies in the memory of its input")

    def _check_surroundings(self) -> None:
        """The clocks are the real ones, and no part of L2 was set aside for lines that a flush leaves."""
        changed = timers.replaced()
        if changed:
            raise Foul(f"it replaced {', '.join(changed)}")
        kept = persisting_bytes()
        if kept != self.persisting:
            set_persisting_bytes(self.persisting)
            raise Foul(f"it keeps {kept} bytes of L2 from being flushed")

    def _other_clocks(self, name: str, timings: Mapping[str, Timing]) -> None:
        """Peak memory, the other clocks, and the signs that only show over all calls."""
        entrant, outcome, timing = self.entrants[name], self.outcomes[name], timings[name]
        last = timing.repeats
        with torch.set_grad_enabled(entrant.trains):
            outcome.peak_bytes = peak_bytes(entrant.ready(last), self.race.device)
            if isinstance(self.watch, CudaStopwatch):
                outcome.notes += self._crosschecked(entrant, timing, last, self.watch)
        outcome.notes += _said_by(entrant.variant)
        if not timing.converged:
            outcome.notes.append("the spread stayed wide")
        late_us = timing.late_us - min(other.late_us for other in timings.values())
        if late_us > max(LATE_US, LATE * timing.median_us):
            raise Foul(f"other streams were still busy {late_us:.0f} µs after it had ended")

    def _crosschecked(self, entrant: Entrant, timing: Timing, number: int, watch: CudaStopwatch) -> list[str]:
        """The call once more by other clocks; a Foul where the device did what the events did not see."""
        from tilewright.measure.timing.crosscheck import crosscheck, own_costs, profile, replay_us

        if entrant.lead_us > _LONGEST_HOST_US:
            return ["the host queues it for so long that no other clock was read"]
        costs = own_costs(self.race.device)
        if costs is None:
            return []
        most_us = BUSY * timing.median_us + BUSY_US
        for _ in range(_LOOKS):
            seen = profile(partial(entrant.ready, number), watch, entrant.lead_us)
            if seen is None or seen.busy_us <= most_us:
                break
        # A backward runs on the stream of its forward, which no other stream can capture.
        graph_us = replay_us(entrant.ready(number), watch) if self.race.direction == "fwd" else None
        if seen and seen.early_us > 0:
            raise Foul(f"{seen.early_us:.0f} µs of its work ran on another stream before its turn")
        if seen and seen.busy_us > most_us:
            raise Foul(f"the device worked {seen.busy_us:.0f} µs for it, its stream only {timing.median_us:.0f}")
        said = crosscheck(timing.median_us, graph_us, seen, costs).disagreement()
        return [said] if said else []

    def _prove(self) -> None:
        for number, results in sorted(self.looked.items()):
            inputs, tangent = self.arguments.drawn(number), self.arguments.tangent_of(number)
            backward = self.race.direction in ("bwd", "fwd+bwd")
            seed = self.arguments.seed(number)
            truth = truth_of(self.race.suite, inputs, seed, backward=backward, tangent=tangent)
            for name, result in results.items():
                outcome = self.outcomes[name]
                if self.variants[name].unverified:
                    continue
                outcome.verified = [*outcome.verified, *truth.judge(result)]
                self._judge(outcome)
            results.clear()

    def _judge(self, outcome: Outcome) -> None:
        broken = [row for row in outcome.verified if not row.ok]
        if broken:
            worst = max(broken, key=lambda row: row.error)
            why = (
                f"is wrong: error {worst.error:.1e}, allowed {worst.bound:.1e}; "
                f"largest {worst.max_error:.1e}, allowed {worst.max_bound:.1e}"
            )
            if worst.max_error == inf and worst.max_bound == 0.0:
                why += f"; its shape or dtype ({worst.dtype}) is not eager's"
            self._refuse(outcome.impl, f"{worst.direction} {worst.tensor} {why}", foul=True)


def _said_by(variant: Variant) -> list[str]:
    """What a variant says of itself that a reader of its figure must know."""
    said = ["it writes over its inputs"] if variant.overwrites_inputs else []
    return [*said, f"values not checked: {variant.unverified}"] if variant.unverified else said


def _in_a_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


@contextmanager
def _own_generators(device: str) -> Iterator[None]:
    """Races seed the generators; the caller's stay as they were. Backward may be called on a graph again."""
    from torch._functorch import config as functorch

    place = torch.device(device)
    donated: Any = functorch.donated_buffer
    with torch.random.fork_rng([place.index or 0] if place.type == "cuda" else []):
        functorch.donated_buffer = False
        try:
            yield
        finally:
            functorch.donated_buffer = donated
