"""One stretch of a program under a profiler: from its start to its stop, and what came of it."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tilewright.measure.synchronisations import marked_synchronisations

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
    """PyTorch's profiler, which writes Kineto's JSON to `path`."""

    def __init__(self, detail: Detail, path: Path) -> None:
        # The C++ side prints a line at each start and stop unless its log level is above them.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        from torch.profiler import ProfilerActivity, profile

        self._path = path
        activities = [ProfilerActivity.CPU]
        if has_gpu():
            activities.append(ProfilerActivity.CUDA)
        self._profiler: torch.profiler.profile = profile(
            activities=activities,
            record_shapes=detail.shapes,
            with_stack=detail.stacks,
            profile_memory=detail.memory,
            acc_events=False,
        )
        self._marks = ExitStack()
        self._began = 0.0

    def start(self) -> None:
        synchronize()
        self._profiler.start()
        self._marks.enter_context(marked_synchronisations())
        self._began = time.perf_counter()

    def stop(self) -> Stretch:
        self._marks.close()
        synchronize()
        seconds = time.perf_counter() - self._began
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(self._path))
        del self._profiler
        return Stretch(count_events(self._path), seconds)


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


def synchronize() -> None:
    """Wait for the GPU, if this process has one at work."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
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
