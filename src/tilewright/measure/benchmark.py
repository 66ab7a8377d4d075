"""Honest timing of several implementations side by side, and the files that keep the figures."""

from __future__ import annotations

import gc
import json
import math
import os
import secrets
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, Protocol

from tilewright.records.errors import UsageError
from tilewright.records.measurement import Direction, Measurement

WARM_UP_SECONDS = 0.05
"""Least time an implementation is warmed up for: clocks rise and thread pools start in it."""
WARM_UP_STEADY = 3
"""Calls in a row that must not beat the fastest by `WARM_UP_GAIN` before warm-up ends."""
WARM_UP_GAIN = 0.05


class Lap(NamedTuple):
    """One timed call, in microseconds; `host_us` is the host's share where a device runs behind it."""

    us: float
    host_us: float | None = None


class Stopwatch(Protocol):
    """Times one call at a time. Tests put a fake clock here."""

    def time(self, function: Callable[[], object]) -> Lap:
        """Run `function` once; what it returns is released before this returns, outside the time."""

    def now(self) -> float:
        """Seconds on a clock that never goes back."""


@dataclass(frozen=True)
class Timing:
    """Quantiles over the repeats of one implementation, in microseconds."""

    median_us: float
    p20_us: float
    p80_us: float
    repeats: int
    converged: bool
    """True: stopped because the median was known closely enough. False: stopped because time ran out."""
    host_us: float | None = None
    """Median time the call held the host, where that differs from the device's time."""


class CpuStopwatch:
    """`perf_counter` around the call."""

    def time(self, function: Callable[[], object]) -> Lap:
        start = time.perf_counter_ns()
        result = function()
        stop = time.perf_counter_ns()
        del result
        return Lap((stop - start) / 1e3)

    def now(self) -> float:
        return time.perf_counter()


class CudaStopwatch:
    """CUDA events around the call, after a write that pushes everything else out of L2.

    That write also keeps the device busy while the host queues the call, so a launch shows in the
    figure only as far as the host is slower than the flush. `flush_l2=False` times cached data.
    """

    def __init__(self, device: str = "cuda", *, flush_l2: bool = True) -> None:
        import torch

        self._device = torch.device(device)
        l2_bytes = int(torch.cuda.get_device_properties(self._device).L2_cache_size)
        flushed = 2 * l2_bytes if flush_l2 else 0
        self._flush = torch.empty(flushed, dtype=torch.uint8, device=self._device)
        with torch.cuda.device(self._device):
            self._start = torch.cuda.Event(enable_timing=True)
            self._stop = torch.cuda.Event(enable_timing=True)

    def time(self, function: Callable[[], object]) -> Lap:
        import torch

        with torch.cuda.device(self._device):
            self._flush.zero_()
            self._start.record()
            began = time.perf_counter_ns()
            result = function()
            returned = time.perf_counter_ns()
            self._stop.record()
            torch.cuda.synchronize()
        del result
        return Lap(float(self._start.elapsed_time(self._stop)) * 1e3, (returned - began) / 1e3)

    def now(self) -> float:
        return time.perf_counter()


def stopwatch_for(device: str) -> Stopwatch:
    """The stopwatch of `cpu`, `cuda` or `cuda:N`; UsageError for any other device."""
    if device == "cpu":
        return CpuStopwatch()
    if device.split(":")[0] == "cuda":
        return CudaStopwatch(device)
    raise UsageError(f"cannot time on device {device!r}; known: cpu, cuda, cuda:N")


def benchmark(
    implementations: Mapping[str, Callable[[], object]],
    *,
    device: str = "cpu",
    min_repeats: int = 20,
    max_seconds: float = 10.0,
    tolerance: float = 0.01,
    stopwatch: Stopwatch | None = None,
) -> dict[str, Timing]:
    """Time every implementation in one interleaved run.

    Each is warmed up until its calls stop getting faster. Then rounds follow, each calling every
    implementation once, in an order that rotates, so that drift of the machine meets all alike.
    Rounds stop when every median is known to `tolerance` (half the width of its 95 % confidence
    interval, relative), or `max_seconds` after the start, warm-up included; `min_repeats` rounds
    always run. Garbage collection is off meanwhile.

    What a callable returns is released before the next call and outside the timed region: the user
    pays for making an output, and whoever holds it pays for dropping it. A callable whose user does
    pay (a training step that drops its graph) drops it itself and returns None.

    Raises UsageError for no implementation, fewer than 3 repeats, or an unknown device. An exception
    of an implementation passes through.
    """
    if not implementations:
        raise UsageError("nothing to time: no implementation was given")
    if min_repeats < 3:
        raise UsageError(f"min_repeats is {min_repeats}; quantiles need at least 3 repeats")
    watch = stopwatch or stopwatch_for(device)
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        deadline = watch.now() + max_seconds
        for function in implementations.values():
            _warm_up(function, watch, max_seconds / 4 / len(implementations))
        laps = _rounds(implementations, watch, min_repeats, deadline, tolerance)
    finally:
        if collecting:
            gc.enable()
    return {name: _timing(own, tolerance) for name, own in laps.items()}


def _warm_up(function: Callable[[], object], watch: Stopwatch, max_seconds: float) -> None:
    """Call until no call is clearly faster than the fastest so far, or `max_seconds` have passed."""
    start = watch.now()
    fastest = math.inf
    steady = 0
    while steady < WARM_UP_STEADY or watch.now() - start < WARM_UP_SECONDS:
        lap = watch.time(function).us
        steady = 0 if lap < fastest * (1 - WARM_UP_GAIN) else steady + 1
        fastest = min(fastest, lap)
        if watch.now() - start >= max_seconds:
            return


def _rounds(
    implementations: Mapping[str, Callable[[], object]],
    watch: Stopwatch,
    min_repeats: int,
    deadline: float,
    tolerance: float,
) -> dict[str, list[Lap]]:
    names = list(implementations)
    laps: dict[str, list[Lap]] = {name: [] for name in names}
    done = 0
    # Each look sorts every lap, so looks are spaced by a share of what is there.
    next_look = min_repeats
    while True:
        for offset in range(len(names)):
            name = names[(done + offset) % len(names)]
            laps[name].append(watch.time(implementations[name]))
        done += 1
        if done < min_repeats:
            continue
        if watch.now() >= deadline:
            return laps
        if done >= next_look:
            if all(median_spread([lap.us for lap in own]) <= tolerance for own in laps.values()):
                return laps
            next_look = done + max(1, done // 8)


def median_spread(samples: Sequence[float]) -> float:
    """Half the width of the 95 % confidence interval of the median, relative to the median.

    The interval lies between order statistics (binomial ranks, normal approximation), so it assumes
    no distribution: https://en.wikipedia.org/wiki/Order_statistic#Confidence_intervals_for_quantiles.

    >>> median_spread([10.0] * 20)
    0.0
    """
    ordered = sorted(samples)
    reach = 1.96 * math.sqrt(len(ordered)) / 2
    low = ordered[max(0, math.floor(len(ordered) / 2 - reach))]
    high = ordered[min(len(ordered) - 1, math.ceil(len(ordered) / 2 + reach))]
    middle = statistics.median(ordered)
    if high == low:
        return 0.0
    return (high - low) / 2 / middle if middle else math.inf


def _timing(laps: Sequence[Lap], tolerance: float) -> Timing:
    times = [lap.us for lap in laps]
    quintiles = statistics.quantiles(times, n=5, method="inclusive")
    host = [lap.host_us for lap in laps if lap.host_us is not None]
    return Timing(
        median_us=statistics.median(times),
        p20_us=quintiles[0],
        p80_us=quintiles[3],
        repeats=len(times),
        converged=median_spread(times) <= tolerance,
        host_us=statistics.median(host) if host else None,
    )


@dataclass(frozen=True)
class Environment:
    """Where and with what a figure was measured: the last columns of a bench row."""

    device: str
    threads: int
    torch: str
    triton: str
    commit: str
    date: str
    """UTC, ISO 8601, to the second."""


def environment(device_name: str) -> Environment:
    """This process, on the device of that name (`NVIDIA H200`, `AMD EPYC 9654`, ...)."""
    import torch

    return Environment(
        device=device_name,
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        triton=_version("triton"),
        commit=_commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit that tilewright's own source is at, or "" where it is not a git checkout."""
    package = Path(__file__).parents[1]
    # Asking for a file of the package too keeps out a foreign repository that surrounds an installation.
    command = ["git", "-C", str(package), "rev-parse", "HEAD", "HEAD:./__init__.py"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split()[0]


def measurement(
    timing: Timing,
    where: Environment,
    *,
    suite: str,
    case: str,
    impl: str,
    direction: Direction,
    nbytes: int | None = None,
    flops: int | None = None,
    predicted_us: float | None = None,
    peak_bytes: int | None = None,
    of_ceiling: float | None = None,
    error: float | None = None,
    eager_error: float | None = None,
) -> Measurement:
    """A row of a bench result file; GB/s and TFLOP/s follow from `nbytes`, `flops` and the median."""
    return Measurement(
        suite=suite,
        case=case,
        impl=impl,
        direction=direction,
        median_us=timing.median_us,
        p20_us=timing.p20_us,
        p80_us=timing.p80_us,
        repeats=timing.repeats,
        predicted_us=predicted_us,
        host_us=timing.host_us,
        peak_bytes=peak_bytes,
        bytes=nbytes,
        flops=flops,
        GBps=None if nbytes is None else nbytes / timing.median_us / 1e3,
        TFLOPs=None if flops is None else flops / timing.median_us / 1e6,
        of_ceiling=of_ceiling,
        error=error,
        eager_error=eager_error,
        **asdict(where),
    )


def write_results(path: Path, rows: Iterable[Measurement]) -> None:
    """Write `rows` as JSON lines, sorted, in place of what is at `path`, or leave that untouched.

    ValueError for a figure that is NaN or infinite, which JSON cannot say.
    """
    lines = [json.dumps(asdict(row), allow_nan=False, ensure_ascii=False) + "\n" for row in sorted(rows, key=_subject)]
    write_atomically(path, "".join(lines), mode=0o644)


def append_results(path: Path, rows: Iterable[Measurement]) -> None:
    """Add `rows` to the file; a new row takes the place of an old one of the same thing measured."""
    known = read_results(path) if path.exists() else []
    latest = {_subject(row): row for row in [*known, *rows]}
    write_results(path, latest.values())


def _subject(row: Measurement) -> tuple[str, str, str, str, str, int]:
    """What was measured where: rows of one subject replace each other, and files are sorted by it."""
    return row.suite, row.case, row.direction, row.impl, row.device, row.threads


def read_results(path: Path) -> list[Measurement]:
    """The rows of a result file; UsageError names the line that is no such row."""
    rows: list[Measurement] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows.append(Measurement(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path}:{number} is no bench result: {error}") from error
    return rows


def write_atomically(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Put `text` at `path` whole or not at all, also when interrupted or with many writers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
