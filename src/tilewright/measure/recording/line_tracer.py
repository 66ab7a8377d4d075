"""Traces the lines of the user's functions with timestamps.

PyTorch's profiler names a Python function by the line of its `def`, and one that was running when the profiler
started, such as a training loop, by the line where it then was. `sys.monitoring` and `sys.settrace` report every line.
"""

from __future__ import annotations

import dis
import json
import re
import sys
import sysconfig
import threading
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias

from tilewright.measure.recording.line_events import LineEvents, library, traced
from tilewright.records.notebook import cell_of

LINES = "tilewright lines"
"""Key in the header of a trace; its value is the result of `LineTracer.told`."""
MOST_LINES = 1_000_000
"""Times that are kept, of 16 bytes each, which count as the recording's memory.

The trace has only those at which an event began."""
_NOWHERE = -1
_LINE_BITS = 32
"""A place is one integer, since a line is logged in every event: the number of the function's code, then the line."""
_GRID_NS, _MOST_OF_GRID = 50_000, 20_000
"""Where no event begins, as in a loop of Python, the line is told at these intervals, longer in a long recording."""
_LATE_NS = 500
"""An operator's line is that shortly after its begin, when the clocks surely agree."""
_MONITORING: Any = getattr(sys, "monitoring", None)
"""In Python from 3.12 on."""
_OTHERS = ("typer", "click", "numpy", "scipy", "pandas", "PIL", "tqdm")
"""Installed packages whose lines are not the user's: those that start this command, and those of arrays and files."""
TraceFunction: TypeAlias = Callable[[FrameType, str, Any], Any]
_OF_INDUCTOR = re.compile(r"c[a-z0-9]{40,}\.py")


class UserFiles(dict[str, bool]):
    """Caches whether a file, as code names it, is the user's."""

    def __missing__(self, name: str) -> bool:
        self[name] = found = is_user_file(Path(name)) or cell_of(name) is not None
        return found


class LineTracer:
    """Traces the calling thread through the user's functions, from `start` to `stop`.

    By compiled code (`line_events.cpp`), which adds 0.1 to 0.2 µs to a line of the user's. Without a C++ compiler from
    Python 3.12 on by `sys.monitoring`, which adds 1.4 µs to each line, and nothing to code that is not the user's;
    before by `sys.settrace`, which adds 0.3 µs to each line, and 0.1 µs to each call of any Python function. If the
    thread is traced already (by a debugger or coverage), it does nothing.
    """

    def __init__(self) -> None:
        self._at = array("q")
        self._which = array("q")
        self._firsts: dict[int, int] = {}
        """The place of line 0 of a function, by the identity of its code: code has a slow hash."""
        self._codes: list[CodeType] = []
        self._user_files = UserFiles()
        self._thread = 0
        self._stopped = False
        self._most = MOST_LINES
        self._ended_early = False
        self._release: Callable[[], None] = lambda: None
        self._compiled = library()
        self._events: LineEvents | None = None
        self._others: list[CodeType] = []
        """Code that is not the user's and that `_events` knows by its address, which therefore stays."""

    @property
    def ended_early(self) -> bool:
        """Whether there were more lines than are kept; what ran after them has no line."""
        return self._ended_early or (self._events is not None and self._events.ended_early)

    def start(self) -> None:
        if sys.gettrace() is not None:
            return
        self._thread = threading.get_native_id()
        frame = sys._getframe(1)
        self._return_to(frame)
        running = [outer for outer in outwards(frame) if self._user_files[outer.f_code.co_filename]]
        if self._compiled is not None:
            self._events = LineEvents(self._compiled, self._first_if_followed, self._most - len(self._at))
        elif _MONITORING is None:
            self._trace(running)
        else:
            self._monitor(running)

    def stop(self) -> None:
        self._stopped, self._most = True, 0
        release, self._release = self._release, lambda: None
        release()
        if self._events is not None:
            self._events.stop()
            self._ended_early = self.ended_early
            self._events.take(self._at, self._which)

    def told(self, begins: Iterable[int]) -> str | None:
        """JSON of `thread` (its number), `places` (file, function, line, and "with" where it enters a block), `since`
        (nanoseconds since 1970, each minus the one before) and `which` (the index of the place at each time, or -1 if
        unknown). None if nothing was traced.

        Only the places where the thread was at one of `begins`, in nanoseconds since 1970, half a microsecond later, or
        at regular intervals.
        """
        if self._thread == 0:
            return None
        needed = {bisect_right(self._at, at) - 1 for begin in begins for at in (begin, begin + _LATE_NS)}
        if self._at:
            apart = max(_GRID_NS, (self._at[-1] - self._at[0]) // _MOST_OF_GRID)
            needed |= {bisect_right(self._at, at) - 1 for at in range(self._at[0], self._at[-1], apart)}
        chosen = sorted(needed - {-1})
        at = [self._at[number] for number in chosen]
        since = [now - last for now, last in zip(at, [0, *at], strict=False)]
        reached = [self._which[number] for number in chosen]
        numbers = {place: number for number, place in enumerate({*reached} - {_NOWHERE})}
        which = [numbers.get(place, _NOWHERE) for place in reached]
        traced = {"thread": self._thread, "places": [*self._described(numbers)], "since": since, "which": which}
        return json.dumps(traced, separators=(",", ":"))

    def _described(self, places: Iterable[int]) -> Iterator[list[object]]:
        # Python tells no profiler of the call that enters a block, which may wait for a lock.
        entered = cache(enters_blocks)
        for place in places:
            code, line = self._codes[place >> _LINE_BITS], place % (1 << _LINE_BITS)
            file = cell_of(code.co_filename) or code.co_filename
            yield [file, code.co_name, line, *(["with"] if line in entered(code) else [])]

    def _monitor(self, running: list[FrameType]) -> None:
        """Events of lines and returns in the user's code only; other code reports its first call, then nothing."""
        free = [tool for tool in range(6) if _MONITORING.get_tool(tool) is None]
        if not free:
            self._thread = 0
            return
        tool, user_files, thread = free[-1], self._user_files, threading.get_ident()
        events, off, local_events = _MONITORING.events, _MONITORING.DISABLE, _MONITORING.set_local_events
        followed: list[CodeType] = []

        def follow(code: CodeType) -> None:
            followed.append(code)
            local_events(tool, code, events.LINE | events.PY_RETURN | events.PY_YIELD)

        def on_start(code: CodeType, _: int) -> object:
            if user_files[code.co_filename] and not self._stopped:
                follow(code)
            return off

        def on_line(code: CodeType, line: int, here: Callable[[], int] = threading.get_ident) -> object:
            if self._stopped:
                return off
            if here() == thread:
                self._reach(self._first(code) + line)
            return None

        def on_return(code: CodeType, _: int, __: object) -> None:
            if user_files[code.co_filename] and not self._stopped and threading.get_ident() == thread:
                self._return_to(sys._getframe(1).f_back)

        # Events of an exception that leaves a function exist for all code alone.
        leaving = dict.fromkeys((events.PY_RETURN, events.PY_YIELD, events.PY_UNWIND), on_return)
        callbacks = {events.PY_START: on_start, events.LINE: on_line, **leaving}
        self._release = partial(_end_monitoring, tool, followed, callbacks)
        _MONITORING.use_tool_id(tool, LINES)
        for event, callback in callbacks.items():
            _MONITORING.register_callback(tool, event, callback)
        for frame in running:
            follow(frame.f_code)
        _MONITORING.restart_events()
        _MONITORING.set_events(tool, events.PY_START | events.PY_UNWIND)

    def _trace(self, running: list[FrameType]) -> None:
        """Install the hooks that Python calls for each function call, and for lines and returns of user functions."""
        user_files, local_traces = self._user_files, dict[int, TraceFunction]()

        def on_call(frame: FrameType, _: str, __: Any) -> TraceFunction | None:
            if not user_files[frame.f_code.co_filename]:
                return None
            code = frame.f_code
            return local_traces.get(id(code)) or local_traces.setdefault(id(code), self._local_trace(code))

        def release() -> None:
            if sys.gettrace() is on_call:
                sys.settrace(None)
            for frame in outwards(sys._getframe(1)):
                if frame.f_trace in local_traces.values():
                    frame.f_trace = None

        self._release = release
        for frame in running:
            frame.f_trace = on_call(frame, "call", None)
        sys.settrace(on_call)

    def _local_trace(self, code: CodeType) -> TraceFunction:
        """What Python calls for each line of a function; the names are its own, since it runs often."""
        first, at, which, now = self._first(code), self._at, self._which, time.time_ns

        def on_event(frame: FrameType, event: str, _: Any) -> TraceFunction | None:
            if len(at) >= self._most:
                # Another thread may have called `stop`; only this thread can end its tracing.
                self._end()
                sys.settrace(None)
                return None
            if event == "line":
                at.append(now())
                which.append(first + frame.f_lineno)
            elif event == "return":
                self._return_to(frame.f_back)
            return on_event

        return on_event

    def _first_if_followed(self, code: CodeType) -> int:
        try:
            if self._user_files[code.co_filename]:
                return self._first(code)
        except Exception:
            # Such as a name that is no path.
            pass
        self._others.append(code)
        return _NOWHERE

    def _first(self, code: CodeType) -> int:
        """The place of a function's line 0."""
        if (first := self._firsts.get(id(code))) is None:
            first = self._firsts[id(code)] = len(self._codes) << _LINE_BITS
            self._codes.append(code)
        return first

    def _reach(self, place: int) -> None:
        if len(self._at) >= self._most:
            self._end()
            return
        self._at.append(time.time_ns())
        self._which.append(place)

    def _return_to(self, frame: FrameType | None) -> None:
        """After a return, time belongs to the calling line: that of the innermost frame of the user's."""
        while frame is not None and not self._user_files[frame.f_code.co_filename]:
            frame = frame.f_back
        self._reach(_NOWHERE if frame is None else self._first(frame.f_code) + (frame.f_lineno or 0))

    def _end(self) -> None:
        """Stop at the last line that fits; the time after it is unknown."""
        if not self._stopped:
            self._stopped = self._ended_early = True
            self._at.append(time.time_ns())
            self._which.append(_NOWHERE)


def enters_blocks(code: CodeType) -> set[int]:
    """The lines of a function at which a `with` statement enters its block."""
    found: set[int] = set()
    line = 0
    for step in dis.get_instructions(code):
        line = (step.positions.lineno if step.positions else None) or line
        if step.opname == "BEFORE_WITH" or (step.opname == "LOAD_SPECIAL" and "enter" in step.argrepr):
            found.add(line)
    return found


def traced_by_another() -> bool:
    """Whether this thread's lines or calls are followed by anything but this module and PyTorch's profiler."""
    tracer, profiler = sys.gettrace(), sys.getprofile()
    if tracer is not None and tracer is not traced and getattr(tracer, "__module__", "") != __name__:
        return True
    if profiler is not None and not is_of_pytorch(profiler):
        return True
    if _MONITORING is None:
        return False
    return any(_MONITORING.get_tool(tool) not in (None, LINES) for tool in range(6))


def is_of_pytorch(profiler: object) -> bool:
    """Whether `sys.getprofile()` gave PyTorch's profiler."""
    return type(profiler).__name__ == "TraceContext"


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_user_file(path: Path) -> bool:
    """Whether a file is outside PyTorch, the standard library and this package, and not generated at run time.

    Other installed packages count as the user's, except `_OTHERS`.
    """
    import torch

    if path.suffix != ".py" or path.name.startswith("<") or _OF_INDUCTOR.match(path.name):
        return False
    if any(path.is_relative_to(folder) for folder in (Path(torch.__file__).parent, Path(__file__).parents[2])):
        return False
    packages = {"site-packages", "dist-packages"} & set(path.parts)
    if packages:
        return path.parts[path.parts.index(packages.pop()) + 1] not in _OTHERS
    # site-packages is inside the standard library's folder, so this comes last.
    return not path.is_relative_to(sysconfig.get_path("stdlib"))


def _end_monitoring(tool: int, followed: Iterable[CodeType], events: Iterable[int]) -> None:
    _MONITORING.set_events(tool, 0)
    for code in followed:
        _MONITORING.set_local_events(tool, code, 0)
    for event in events:
        _MONITORING.register_callback(tool, event, None)
    _MONITORING.free_tool_id(tool)
