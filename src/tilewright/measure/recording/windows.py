"""Windows: one profiler each, from its start to its stop, with the number of events and the duration."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tilewright.measure.recording.compilation import Replacements, forget_this_thread, unrecorded_thread
from tilewright.measure.recording.host_ranges import HostRanges, name_cells
from tilewright.measure.recording.line_tracer import LineTracer
from tilewright.measure.recording.modules import module_ranges
from tilewright.measure.recording.other_profilers import starting_our_own
from tilewright.measure.recording.plan import Detail, RecordingPlan
from tilewright.measure.recording.ranges import Log, nvtx
from tilewright.records.errors import warn_once

if TYPE_CHECKING:
    import torch

_EVENT = b'"ph":'
_CHUNK = 1 << 24
THREADS, ANOMALIES = "tilewright threads", "tilewright anomalies"
"""Keys in the header of a trace: on how many threads PyTorch runs one operator of a CPU, and whether it looks for
anomalies."""


@dataclass(frozen=True)
class WindowResult:
    """The events in a window's trace (0 if it has none), its duration, and whether it had more lines than are kept."""

    events: int
    seconds: float
    lines_ended_early: bool = False


class Window(Protocol):
    """A profiler that runs from `start` to `stop`, once; `mark` opens a range and returns what closes it."""

    def mark(self, name: str) -> Callable[[], None]: ...

    @property
    def new_log(self) -> Callable[[], Log] | None:
        """Makes the log of a thread's modules or phases, if there is a faster way than `mark`."""

    @property
    def finds_modules(self) -> bool:
        """Whether it records the calls of modules without a mark."""

    def paused(self) -> AbstractContextManager[None]:
        """While inside, what the calling thread runs is not recorded."""

    def drop(self, prefix: str) -> None:
        """Leave out the ranges that have ended and whose names begin so."""

    def forget(self) -> None:
        """Stop in a child of a fork, where nobody reads what this process records."""

    def start(self) -> None: ...

    def stop(self) -> WindowResult: ...


class _TraceWindow:
    """PyTorch's profiler, which writes Kineto's JSON to `path`, with `labels` in its header.

    `mark` keeps ranges as timestamps, which are merged into the trace at the end: `record_function` takes ten times as
    long, and the profiler has to record operators for it.
    """

    def __init__(
        self,
        activities: Sequence[torch.profiler.ProfilerActivity],
        detail: Detail,
        path: Path,
        labels: Mapping[str, str],
        *,
        layers: bool = True,
    ) -> None:
        self._path = path
        self._layers = layers
        self.finds_modules = detail.stacks
        self._labels = labels
        self._profiler: Any = _profiler(activities, detail)
        self._host_ranges = HostRanges()
        self._lines: LineTracer | None = None
        self._began = 0.0

    def mark(self, name: str) -> Callable[[], None]:
        return self._host_ranges.mark(name)

    @property
    def new_log(self) -> Callable[[], Log] | None:
        return self._host_ranges.log

    def paused(self) -> AbstractContextManager[None]:
        return unrecorded_thread()

    def drop(self, prefix: str) -> None:
        self._host_ranges.drop(prefix)

    def forget(self) -> None:
        if self._lines is not None:
            self._lines.stop()
        forget_this_thread()

    def start(self) -> None:
        self._began = _start(self._profiler, self._labels)

    def stop(self) -> WindowResult:
        synchronize()
        seconds = time.perf_counter() - self._began
        lines = self._lines
        if lines is not None:
            lines.stop()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        bare = self._path.with_suffix(".bare")
        profiler.export_chrome_trace(str(bare))
        name_cells(bare)
        if self.finds_modules:
            self._host_ranges.add(module_ranges(profiler.profiler.kineto_results, layers=self._layers))
        try:
            self._host_ranges.join(bare, self._path, lines)
        except (OSError, ValueError) as error:
            warn_once(f"steps, phases, layers and source lines are not in the trace: {type(error).__name__}: {error}")
            bare.replace(self._path)
        bare.unlink(missing_ok=True)
        return WindowResult(count_events(self._path), seconds, bool(lines and lines.ended_early))


class KinetoWindow(_TraceWindow):
    """The host's operators, in the plan's detail, and the devices."""

    def __init__(self, plan: RecordingPlan, path: Path, labels: Mapping[str, str] | None = None) -> None:
        from torch.profiler import ProfilerActivity

        activities = [ProfilerActivity.CPU]
        if has_gpu():
            activities.append(ProfilerActivity.CUDA)
        super().__init__(activities, plan.detail, path, labels or {}, layers=plan.layers)
        self._lines = LineTracer() if plan.detail.stacks else None

    def start(self) -> None:
        super().start()
        if self._lines is not None:
            self._lines.start()


class DeviceWindow(_TraceWindow):
    """The devices and the CUDA calls only."""

    def __init__(self, path: Path, labels: Mapping[str, str]) -> None:
        from torch.profiler import ProfilerActivity

        super().__init__([ProfilerActivity.CUDA], Detail(shapes=False, stacks=False, memory=False), path, labels)

    def settled(self) -> None:
        """The window's time begins now; the profiler has had time to start since `start`."""
        synchronize()
        self._began = time.perf_counter()


def _profiler(activities: Sequence[torch.profiler.ProfilerActivity], detail: Detail) -> torch.profiler.profile:
    # At its default log level Kineto prints a line at each start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    from torch.profiler import profile

    return profile(
        activities=activities,
        record_shapes=detail.shapes,
        with_stack=detail.stacks,
        profile_memory=detail.memory,
        acc_events=False,
    )


def _start(profiler: torch.profiler.profile, labels: Mapping[str, str]) -> float:
    """Start `profiler`; returns the time on `perf_counter` at which it records."""
    from tilewright.pytorch.compiler import without_importing_inductor

    synchronize()
    with warnings.catch_warnings():
        # The warning is about earlier cycles, and this profiler has one.
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
        with starting_our_own(), without_importing_inductor():
            profiler.start()
    for name, value in {**_settings(), **labels}.items():
        profiler.add_metadata(name, value)
    return time.perf_counter()


def _settings() -> dict[str, str]:
    """PyTorch's, that change what an operator takes."""
    import torch

    looks = {ANOMALIES: "true"} if torch.is_anomaly_enabled() else {}
    return {THREADS: str(torch.get_num_threads()), **looks}


class NsightWindow:
    """A window that Nsight Systems records, run as `nsys profile -c cudaProfilerApi`."""

    new_log, finds_modules = None, False

    def __init__(self) -> None:
        self._began = 0.0

    def mark(self, name: str) -> Callable[[], None]:
        return nvtx(name)

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def drop(self, prefix: str) -> None:
        pass

    def forget(self) -> None:
        pass

    def start(self) -> None:
        from torch.cuda import profiler

        synchronize()
        profiler.start()
        self._began = time.perf_counter()

    def stop(self) -> WindowResult:
        from torch.cuda import profiler

        synchronize()
        profiler.stop()
        return WindowResult(0, time.perf_counter() - self._began)


def count_events(path: Path) -> int:
    """The events in a Chrome trace as Kineto writes it, where each names its phase once."""
    found, rest = 0, b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            text = rest + chunk
            found += text.count(_EVENT)
            # A match that straddles two chunks is counted with the second.
            rest = text[-(len(_EVENT) - 1) :]
    return found


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def gpu_in_use() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_initialized()


def synchronize() -> None:
    """Wait for the GPU, if this process has initialised CUDA."""
    import torch

    if gpu_in_use():
        torch.cuda.synchronize()


_never_ended: list[object] = []


class RangesWithinWindows:
    """While entered, no `record_function` that began in one window ends in another.

    PyTorch would write the end into the first window's freed memory (observed in 2.13: heap corruption). Such a
    range is kept alive and never ended; no trace could contain all of it.
    """

    def __init__(self, replacements: Replacements) -> None:
        self._replacements = replacements
        self._open: int | None = None
        self._windows = 0
        self._patched = ExitStack()

    def opened(self) -> None:
        self._windows += 1
        self._open = self._windows

    def closed(self) -> None:
        self._open = None

    def __enter__(self) -> RangesWithinWindows:
        from torch.profiler import record_function

        begin, end = record_function.__enter__, record_function.__exit__

        @wraps(begin)
        def enter(span: Any) -> Any:
            span.tilewright_window = self._open
            return begin(span)  # type: ignore[no-untyped-call]

        @wraps(end)
        def leave(span: Any, *error: Any) -> None:
            try:
                began_in = span.tilewright_window
            except AttributeError:
                began_in = None
            if began_in is None or self._open in (None, began_in):
                end(span, *error)
            else:
                _never_ended.append(span)

        for name, replacement in (("__enter__", enter), ("__exit__", leave)):
            self._patched.enter_context(self._replacements.attribute(record_function, name, replacement))
        return self

    def __exit__(self, *_: object) -> None:
        self._patched.close()
