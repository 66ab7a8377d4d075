"""What `whatif` predicts for a change, beside the same program with that change made.

    python -m benchmarks.whatif [--device cpu|cuda] [--out FILE] [--explain] [NAME…]

Each program is profiled, and its step with the change predicted as a ratio. Then both programs run in turn, and the
step of the changed one is compared with that ratio of the step of the other one. `--explain` profiles the
changed program too, and shows for both how long the device works in a step, on how many kernels and copies.
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
from tilewright.store.query import reading
from tilewright.trace.whatif.answer import what_if

_ROUNDS = 5


@dataclass(frozen=True)
class Result:
    """Milliseconds of a step; `error` is of the predicted one."""

    name: str
    asked: str
    before_ms: float
    predicted_ms: float
    after_ms: float
    error: float
    explained: str = ""


def _profiled(name: str, make: Callable[[], Step], alone: AbstractContextManager[object]) -> Path:
    step = make()
    recorded = tilewright.profile(name.replace(" ", "-"), wait=8, warmup=2, active=4)
    with recorded as profile, alone:
        for _ in range(16):
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
    (predicted,) = what_if(run, [change.asked]).predictions
    explained = f"{_busy(run)} -> {_busy(_profiled(change.name, change.after, alone))}" if explains else ""
    before, after = change.before(), change.after()
    times: tuple[list[float], list[float]] = ([], [])
    with alone:
        for turn in range(_ROUNDS + 1):
            for step, into in zip((before, after), times, strict=True):
                took = _timed(step, device, seconds / _ROUNDS / 2)
                if turn:
                    into.append(took)
    first, second = (median(into) for into in times)
    expected = first * predicted.predicted_us / predicted.measured_us
    return Result(change.name, change.asked, first, expected, second, expected / second - 1, explained)


class Alone:
    """Holds a file that several of these processes share, so that one of them uses the device at a time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


def _timed(step: Step, device: str, seconds: float) -> float:
    """Milliseconds of a step; on a CPU of the tenth percentile, which other programs delay least."""
    step()
    took: list[float] = []
    begun = _now(device)
    while not took or time.perf_counter() - begun < seconds:
        at = time.perf_counter()
        step()
        took.append(time.perf_counter() - at)
    whole = _now(device) - begun
    return 1e3 * (whole / len(took) if device == "cuda" else sorted(took)[len(took) // 10])


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
