"""Traces the lines of the user's functions with timestamps.

PyTorch's profiler names a Python function by the line of its `def`, and one that was running when the profiler
started, such as a training loop, by the line where it then was. `sys.settrace` reports every line.
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
import threading
import time
from array import array
from pathlib import Path
from types import FrameType
from typing import Any

LINES = "tilewright lines"
"""Key in the header of a trace; its value is the result of `LineTracer.stop`."""
_MOST = 100_000
"""About 1 MB in the header of the trace, which readers load as a whole."""
_NOWHERE = -1
_STARTERS = ("typer", "click")
_OF_INDUCTOR = re.compile(r"c[a-z0-9]{40,}\.py")


class LineTracer:
    """Traces the calling thread through the user's functions, from `start` to `stop`.

    It adds about 0.5 µs to each call of a Python function and 1 µs to each line of the user's. If the thread is
    traced already (by a debugger or coverage), it does nothing.
    """

    def __init__(self) -> None:
        self._at = array("q")
        self._which = array("q")
        self._places: dict[tuple[str, str, int], int] = {}
        self._user_files: dict[str, bool] = {}
        self._thread = 0
        self._stopped = False

    def start(self) -> None:
        if sys.gettrace() is not None:
            return
        self._thread = threading.get_native_id()
        frame: FrameType | None = sys._getframe(1)
        self._return_to(frame)
        while frame is not None:
            if self._is_user_frame(frame):
                frame.f_trace = self._on_event
            frame = frame.f_back
        sys.settrace(self._on_call)

    def stop(self) -> str | None:
        """JSON of `thread` (its number), `places` (file, function, line), `since` (nanoseconds since 1970, each minus
        the one before) and `which` (the index of the place at each time, or -1 if unknown). None if nothing was traced.
        """
        if self._thread == 0:
            return None
        self._stopped = True
        if sys.gettrace() == self._on_call:
            sys.settrace(None)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_trace == self._on_event:
                frame.f_trace = None
            frame = frame.f_back
        before = [0, *self._at[:-1]]
        since = [at - last for at, last in zip(self._at, before, strict=True)] if self._at else []
        traced = {
            "thread": self._thread,
            "places": list(self._places),
            "since": since,
            "which": self._which.tolist(),
        }
        return json.dumps(traced, separators=(",", ":"))

    def _on_call(self, frame: FrameType, _: str, __: Any) -> Any:
        if self._stopped:
            # Another thread called `stop`; only this thread can end its tracing.
            sys.settrace(None)
            return None
        return self._on_event if self._is_user_frame(frame) else None

    def _on_event(self, frame: FrameType, event: str, _: Any) -> Any:
        if self._stopped:
            return None
        if event == "line":
            self._enter_line(frame)
        elif event == "return":
            self._return_to(frame.f_back)
        return self._on_event

    def _enter_line(self, frame: FrameType) -> None:
        at = time.time_ns()
        code = frame.f_code
        place = (code.co_filename, code.co_name, frame.f_lineno)
        self._append(self._places.setdefault(place, len(self._places)), at)

    def _return_to(self, frame: FrameType | None) -> None:
        """After a return, time belongs to the calling line: that of the innermost frame of the user's."""
        while frame is not None and not self._is_user_frame(frame):
            frame = frame.f_back
        if frame is not None:
            self._enter_line(frame)
        else:
            self._append(_NOWHERE, time.time_ns())

    def _append(self, place: int, at: int) -> None:
        if len(self._at) >= _MOST:
            place = _NOWHERE
            sys.settrace(None)
        self._which.append(place)
        self._at.append(at)

    def _is_user_frame(self, frame: FrameType) -> bool:
        name = frame.f_code.co_filename
        known = self._user_files.get(name)
        if known is None:
            known = self._user_files[name] = is_user_file(Path(name))
        return known


def is_user_file(path: Path) -> bool:
    """Whether a file is outside PyTorch, the standard library and this package, and not generated at run time.

    Other installed packages count as the user's, except those that start this command.
    """
    import torch

    if path.suffix != ".py" or path.name.startswith("<") or _OF_INDUCTOR.match(path.name):
        return False
    if any(path.is_relative_to(folder) for folder in (Path(torch.__file__).parent, Path(__file__).parents[2])):
        return False
    packages = {"site-packages", "dist-packages"} & set(path.parts)
    if packages:
        return path.parts[path.parts.index(packages.pop()) + 1] not in _STARTERS
    # site-packages is inside the standard library's folder, so this comes last.
    return not path.is_relative_to(sysconfig.get_path("stdlib"))
