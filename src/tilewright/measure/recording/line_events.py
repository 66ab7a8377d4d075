"""Traces lines by `line_events.cpp`, where a C++ compiler is on the machine."""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tilewright.records.cxx import shared_object
from tilewright.records.errors import TilewrightError

_FIRST_OF: Any = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.py_object)


@cache
def library() -> ctypes.PyDLL | None:
    """The compiled functions, from the cache or compiled now (0.1 s); None where that fails."""
    try:
        source = Path(__file__).with_name("line_events.cpp").read_text("utf-8")
        found = ctypes.PyDLL(str(shared_object(source, ("-O2",), sys.version)))
    except (TilewrightError, OSError):
        return None
    found.tilewright_start.restype = ctypes.c_void_p
    found.tilewright_start.argtypes = ctypes.py_object, _FIRST_OF, ctypes.c_int64
    for function in (found.tilewright_times, found.tilewright_places):
        function.restype, function.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    for function in (found.tilewright_size, found.tilewright_ended_early, found.tilewright_forget):
        function.restype, function.argtypes = ctypes.c_int64, (ctypes.c_void_p,)
    found.tilewright_stop.argtypes = ctypes.c_void_p, ctypes.c_int
    return found


def traced(frame: FrameType, event: str, argument: object) -> None:
    """What `sys.gettrace()` gives meanwhile; called only where somebody sets that again."""


_running: set[LineEvents] = set()
"""Until they stop, compiled code calls their functions."""


class LineEvents:
    """Traces the calling thread until `stop`, which any thread may call."""

    def __init__(self, functions: ctypes.PyDLL, first_of: Callable[[CodeType], int], most: int) -> None:
        """`first_of`: the place of a function's line 0, or -1 if its lines are not followed. It keeps the code alive,
        is asked once, and raises nothing."""
        self._functions, self._first_of = functions, _FIRST_OF(first_of)
        _running.add(self)
        self._log = functions.tilewright_start(traced, self._first_of, most)

    def stop(self) -> None:
        _running.discard(self)
        if self._log is not None:
            self._functions.tilewright_stop(self._log, sys.gettrace() is traced)

    @property
    def ended_early(self) -> bool:
        return self._log is not None and bool(self._functions.tilewright_ended_early(self._log))

    def take(self, times: array[int], places: array[int]) -> None:
        """Add what was logged, after `stop`; later calls add nothing."""
        if self._log is None:
            return
        functions, log, self._log = self._functions, self._log, None
        nbytes = 8 * functions.tilewright_size(log)
        times.frombytes(ctypes.string_at(functions.tilewright_times(log), nbytes))
        places.frombytes(ctypes.string_at(functions.tilewright_places(log), nbytes))
        functions.tilewright_forget(log)
