"""One stretch of a program under a profiler: from its start to its stop, and what came of it."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tilewright.measure.recording.lines import LINES, Lines
from tilewright.measure.recording.stamps import Stamps

if TYPE_CHECKING:
    import torch

_EVENT = b'"ph":'
_CHUNK = 1 << 24


@dataclass(frozen=True)
class Detail:
    """What is written down of each event. Each costs time while recording: `docs/profile.md` has the figures."""

    shapes: bool = True
    stacks: bool = True
    memory: bool = True


@dataclass(frozen=True)
class Stretch:
    """A stretch that ended: the events in its trace (0 if nothing wrote one), and how long it was."""

    events: int
    seconds: float


class Window(Protocol):
    """A profiler that runs from `start` to `stop`, once."""

    def start(self) -> None: ...

    def stop(self) -> Stretch: ...


class KinetoWindow:
    """PyTorch's profiler, which writes Kineto's JSON to `path`, with the `labels` among its header."""

    def __init__(self, detail: Detail, path: Path, labels: Mapping[str, str] | None = None) -> None:
        from torch.profiler import ProfilerActivity

        self._path = path
        self._labels = labels or {}
        activities = [ProfilerActivity.CPU]
        if has_gpu():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = _profiler(activities, detail)
        self._lines = Lines() if detail.stacks else None
        self._began = 0.0

    def start(self) -> None:
        self._began = _start(self._profiler, self._labels)
        if self._lines is not None:
            self._lines.start()

    def stop(self) -> Stretch:
        synchronize()
        seconds = time.perf_counter() - self._began
        lines = self._lines.stop() if self._lines is not None else None
        if lines is not None:
            self._profiler.add_metadata_json(LINES, lines)
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self._path))
        del self._profiler
        return Stretch(count_events(self._path), seconds)


class DeviceWindow:
    """A stretch of which PyTorch's profiler records the devices and the calls into CUDA, and nothing of the host.

    Ranges are kept by `mark` and join the trace at the end: the profiler would want every operator with them.
    """

    def __init__(self, path: Path, labels: Mapping[str, str]) -> None:
        from torch.profiler import ProfilerActivity

        self._path = path
        self._labels = labels
        self._profiler = _profiler([ProfilerActivity.CUDA], Detail(shapes=False, stacks=False, memory=False))
        self._stamps = Stamps()
        self._began = 0.0

    def mark(self, name: str) -> Callable[[], None]:
        return self._stamps.mark(name)

    def settled(self) -> None:
        """The stretch begins now: what ran since `start` only let the profiler come up to pace."""
        synchronize()
        self._began = time.perf_counter()

    def start(self) -> None:
        self._began = _start(self._profiler, self._labels)

    def stop(self) -> Stretch:
        synchronize()
        seconds = time.perf_counter() - self._began
        self._profiler.stop()
        bare = self._path.with_suffix(".bare")
        self._profiler.export_chrome_trace(str(bare))
        del self._profiler
        self._stamps.join(bare, self._path)
        bare.unlink()
        return Stretch(count_events(self._path), seconds)


def _profiler(activities: Sequence[torch.profiler.ProfilerActivity], detail: Detail) -> torch.profiler.profile:
    # The C++ side prints a line at each start and stop unless its log level is above them.
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
    """The moment at which `profiler` was recording."""
    synchronize()
    with warnings.catch_warnings():
        # A profiler for one cycle has no earlier ones to lose.
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
        profiler.start()
    for name, value in labels.items():
        profiler.add_metadata(name, value)
    return time.perf_counter()


class NsightWindow:
    """A stretch that Nsight Systems records, started with `nsys profile -c cudaProfilerApi`."""

    def __init__(self) -> None:
        self._began = 0.0

    def start(self) -> None:
        from torch.cuda import profiler

        synchronize()
        profiler.start()
        self._began = time.perf_counter()

    def stop(self) -> Stretch:
        from torch.cuda import profiler

        synchronize()
        profiler.stop()
        return Stretch(0, time.perf_counter() - self._began)


def count_events(path: Path) -> int:
    """The events in a Chrome trace as Kineto writes it, where each names its phase once."""
    found, rest = 0, b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            text = rest + chunk
            found += text.count(_EVENT)
            # What begins at the end of this chunk is counted with the next one.
            rest = text[-(len(_EVENT) - 1) :]
    return found


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def gpu_at_work() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_initialized()


def synchronize() -> None:
    """Wait for the GPU, if this process has one at work."""
    import torch

    if gpu_at_work():
        torch.cuda.synchronize()


_never_ended: list[object] = []


class KeptApart:
    """While it is entered, no `record_function` that began in one window ends in another.

    PyTorch would write its end into the first window's memory, which is gone by then (seen in 2.13: the heap
    is damaged). Such a range is kept and never ended; no trace would have held all of it.
    """

    def __init__(self) -> None:
        self._open: int | None = None
        self._windows = 0
        self._patched = ExitStack()

    def opened(self) -> None:
        self._windows += 1
        self._open = self._windows

    def closed(self) -> None:
        self._open = None

    def __enter__(self) -> KeptApart:
        from torch.profiler import record_function

        begin, end = record_function.__enter__, record_function.__exit__

        @wraps(begin)
        def enter(span: Any) -> Any:
            span.tilewright_window = self._open
            return begin(span)  # type: ignore[no-untyped-call]

        @wraps(end)
        def leave(span: Any, *error: Any) -> None:
            began_in = getattr(span, "tilewright_window", None)
            if began_in is None or self._open in (None, began_in):
                end(span, *error)
            else:
                _never_ended.append(span)

        for name, replacement, before in (("__enter__", enter, begin), ("__exit__", leave, end)):
            setattr(record_function, name, replacement)
            self._patched.callback(setattr, record_function, name, before)
        return self

    def __exit__(self, *_: object) -> None:
        self._patched.close()
