"""The lines of the user's own functions, each with the moment at which the program came to it.

PyTorch's profiler names a Python function by the line of its `def`, and one that was running when the profiler
started, such as a training loop, by the line where it then was. `sys.settrace` is told of every line.
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
"""In the header of a trace: what `Lines.stop` gives."""
_MOST = 100_000
"""About 1 MB in the header of the trace, which readers look at as a whole."""
_NOWHERE = -1
_STARTERS = ("typer", "click")
_OF_INDUCTOR = re.compile(r"c[a-z0-9]{40,}\.py")


class Lines:
    """Follows the thread that starts it through the functions of the user's own, from `start` to `stop`.

    Each call of a Python function costs some 0.5 µs meanwhile, and each line of the user's about 1 µs. Where
    somebody else traces the thread, a debugger or a measure of coverage, nothing is followed.
    """

    def __init__(self) -> None:
        self._at = array("q")
        self._which = array("q")
        self._places: dict[tuple[str, str, int], int] = {}
        self._own_files: dict[str, bool] = {}
        self._thread = 0
        self._stopped = False

    def start(self) -> None:
        if sys.gettrace() is not None:
            return
        self._thread = threading.get_native_id()
        frame: FrameType | None = sys._getframe(1)
        self._came_back_to(frame)
        while frame is not None:
            if self._is_own(frame):
                frame.f_trace = self._told
            frame = frame.f_back
        sys.settrace(self._called)

    def stop(self) -> str | None:
        """What was followed as JSON: the thread's number; places, each a file, function and line; nanoseconds since
        1970, each less the one before; the place at each of them, or -1 where it is not known. None where nothing was.
        """
        if self._thread == 0:
            return None
        self._stopped = True
        if sys.gettrace() == self._called:
            sys.settrace(None)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_trace == self._told:
                frame.f_trace = None
            frame = frame.f_back
        before = [0, *self._at[:-1]]
        since = [at - last for at, last in zip(self._at, before, strict=True)] if self._at else []
        followed = {
            "thread": self._thread,
            "places": list(self._places),
            "since": since,
            "which": self._which.tolist(),
        }
        return json.dumps(followed, separators=(",", ":"))

    def _called(self, frame: FrameType, _: str, __: Any) -> Any:
        if self._stopped:
            # By another thread, which cannot end the tracing of this one.
            sys.settrace(None)
            return None
        return self._told if self._is_own(frame) else None

    def _told(self, frame: FrameType, event: str, _: Any) -> Any:
        if self._stopped:
            return None
        if event == "line":
            self._came_to(frame)
        elif event == "return":
            self._came_back_to(frame.f_back)
        return self._told

    def _came_to(self, frame: FrameType) -> None:
        at = time.time_ns()
        code = frame.f_code
        place = (code.co_filename, code.co_name, frame.f_lineno)
        self._reached(self._places.setdefault(place, len(self._places)), at)

    def _came_back_to(self, frame: FrameType | None) -> None:
        """The rest of the line that called: the innermost of the user's own frames, as the trace shows them too."""
        while frame is not None and not self._is_own(frame):
            frame = frame.f_back
        if frame is not None:
            self._came_to(frame)
        else:
            self._reached(_NOWHERE, time.time_ns())

    def _reached(self, place: int, at: int) -> None:
        if len(self._at) >= _MOST:
            place = _NOWHERE
            sys.settrace(None)
        self._which.append(place)
        self._at.append(at)

    def _is_own(self, frame: FrameType) -> bool:
        name = frame.f_code.co_filename
        own = self._own_files.get(name)
        if own is None:
            own = self._own_files[name] = is_the_users(Path(name))
        return own


def is_the_users(path: Path) -> bool:
    """Whether a file is neither PyTorch's, nor the standard library's, nor this package's, nor made while running.

    Other packages call as users do; those that only started this command do not.
    """
    import torch

    if path.suffix != ".py" or path.name.startswith("<") or _OF_INDUCTOR.match(path.name):
        return False
    if any(path.is_relative_to(folder) for folder in (Path(torch.__file__).parent, Path(__file__).parents[2])):
        return False
    packages = {"site-packages", "dist-packages"} & set(path.parts)
    if packages:
        return path.parts[path.parts.index(packages.pop()) + 1] not in _STARTERS
    # Packages lie within the folder of the standard library.
    return not path.is_relative_to(sysconfig.get_path("stdlib"))
