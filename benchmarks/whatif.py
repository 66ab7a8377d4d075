"""What `whatif` predicts for a change, beside the same program with that change made.

    python -m benchmarks.whatif [--device cpu|cuda] [--out FILE] [--explain] [NAME…]

Each program is profiled, and its step with the change predicted as a ratio. Then both programs run in turn, some steps
each, and the median of the measured ratios is compared with that. On a CPU a step counts without the time in which
its thread could have run and had no processor. `--explain` profiles the changed program too, and shows for both how
long the device works in a step, on how many kernels and copies.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

import tilewright
from benchmarks.whatif_programs import Change, Programs, Step
from tilewright.measure.recording.processor_time import ThreadClock
from tilewright.store.query import reading
from tilewright.trace.whatif.answer import what_if

_ROUNDS = 9
_RECORDED = 8
_FIRST, _FEWEST = 4, 5
"""Steps of a turn that are not counted (a DataLoader's workers made their batches meanwhile), and least that are."""


@dataclass(frozen=True)
class Result:
    """Milliseconds of a step, `after_ms` by the measured ratio; `error` is of the predicted one."""

    name: str
    asked: str
    before_ms: float
    predicted_ms: float
    after_ms: float
    error: float
    explained: str = ""


def _profiled(name: str, make: Callable[[], Step], alone: AbstractContextManager[object]) -> Path:
    step = make()
    recorded = tilewright.profile(name.replace(" ", "-"), wait=8, warmup=2, active=_RECORDED)
    with recorded as profile, alone:
        for _ in range(_RECORDED + 12):
            step()
            profile.step()
    return profile.path


def _busy(run: Path) -> str:
    """How long the device works in a recorded step, on how many kernels and copies, and the longest of them."""
    with reading(run) as connection:
        ((ms, count, longest),) = connection.execute(
            """WITH steps AS (SELECT count(*) AS steps FROM step),
                    kinds AS (SELECT name, sum(dur) / 1e6 AS ms, count(*) AS calls FROM device_slice GROUP BY name)
               SELECT sum(ms) / any_value(steps), sum(calls) / any_value(steps),
                      list(format('{:.3f} {}', ms / steps, name[:40]) ORDER BY ms DESC)[:3]
               FROM kinds, steps"""
        ).fetchall()
    return "no device" if ms is None else f"{ms:.3f} ms of {count:.0f} ({'; '.join(longest)})"


def measured(
    change: Change, device: str, seconds: float, alone: AbstractContextManager[object], explains: bool = False
) -> Result:
    """Profile the program before the change, predict, and time both in turn; `alone` is held while steps run."""
    run = _profiled(change.name, change.before, alone)
    explained = f"{_busy(run)} -> {_busy(_profiled(change.name, change.after, alone))}" if explains else ""
    before, after = change.before(), change.after()
    turns: list[tuple[float, float]] = []
    with alone:
        for _ in range(_ROUNDS + 1):
            first, second = (_timed(step, device, seconds / _ROUNDS / 2) for step in (before, after))
            turns.append((first, second))
    # The first turn warms both up.
    first = median(first for first, _ in turns[1:])
    ratio = median(second / first for first, second in turns[1:])
    (predicted,) = what_if(run, [change.asked], 1e3 * first).predictions
    expected = predicted.predicted_us / predicted.measured_us
    return Result(change.name, change.asked, first, first * expected, first * ratio, expected / ratio - 1, explained)


class Alone:
    """Holds a file that several of these processes share, so that one of them uses the device at a time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


def _timed(step: Step, device: str, seconds: float) -> float:
    """Milliseconds of a step, the mean; on a CPU without the time that other programs took."""
    for _ in range(_FIRST):
        step()
    queued: list[float] = []
    clock, begun = ThreadClock(), _now(device)
    steps = 0
    while steps < _FEWEST or time.perf_counter() - begun < seconds:
        step()
        steps += 1
    # Of the turn as a whole: a single step may end before the time in which it had no processor is known.
    clock.lap([], queued)
    return (1e3 * (_now(device) - begun) - sum(queued) / 1e3 * (device == "cpu")) / steps


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--part", type=int, nargs=2, default=[0, 1], metavar=("I", "N"), help="every N-th from I on")
    parser.add_argument("--explain", action="store_true", help="profile the changed program too")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.device == "cpu":
        torch.set_num_threads(1)
    rows = []
    alone = Alone(Path(tempfile.gettempdir(), "tilewright-whatif.lock"))
    chosen = [it for it in Programs(given.device).changes() if not given.names or it.name in given.names]
    for change in chosen[given.part[0] :: given.part[1]]:
        try:
            found = measured(change, given.device, given.seconds, alone, given.explain)
        except Exception as error:  # The others are measured all the same.
            print(f"{change.name:24} {type(error).__name__}: {error}", flush=True)
            continue
        rows.append(found)
        if given.out:
            given.out.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
        print(
            f"{found.name:24} {found.asked:32} {found.before_ms:8.3f} ms  predicted {found.predicted_ms:8.3f}  "
            f"is {found.after_ms:8.3f}  {found.error:+7.1%}",
            *([f"\n    {found.explained}"] if found.explained else []),
            flush=True,
        )
    print(f"{sum(abs(row.error) <= 0.05 for row in rows)} of {len(rows)} within 5 %")


if __name__ == "__main__":
    main()
