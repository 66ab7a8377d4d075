"""The processor time of steps: of their thread, of the program's other threads, and of processes that it started."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tilewright.measure.recording.line_tracer import is_user_file, outwards
from tilewright.measure.recording.plan import ProcessorTime
from tilewright.records.notebook import file_name


class ProcessorClock:
    """Counts from when it is made, on the thread that makes the steps."""

    def __init__(self) -> None:
        self._threads, self._workers, self._queued = _threads(), _workers(_processor_seconds), _workers(_queued_seconds)

    def taken(self, steps: int) -> ProcessorTime:
        """Since then, for each of so many steps."""
        here = threading.get_ident()
        spent = {who: now - self._threads.get(who, 0.0) for who, now in _threads().items()}
        workers, queued = _since(self._workers, _processor_seconds), _since(self._queued, _queued_seconds)
        own = spent.pop(here, 0.0)
        busiest = max(spent, key=spent.__getitem__, default=None)
        return ProcessorTime(
            own * 1e6 / steps,
            sum(spent.values()) * 1e6 / steps,
            "" if busiest is None else _name(busiest),
            len(workers),
            sum(workers) * 1e6 / steps,
            sum(queued) * 1e6 / steps,
        )


class ThreadClock:
    """The processor time of the thread that asks, and how long it could have run and had no processor, or nothing where
    the system does not tell; from one lap to the next, in microseconds."""

    def __init__(self) -> None:
        # Opened once: a step may take less time than that.
        try:
            self._schedule = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:
            self._schedule = -1
        self._at, self._queued_at = self._now()

    def __del__(self) -> None:
        if self._schedule >= 0:
            os.close(self._schedule)

    def _now(self) -> tuple[float, float | None]:
        try:
            queued = int(os.pread(self._schedule, 100, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            queued = None
        return time.thread_time(), queued

    def lap(self, ran: list[float], queued: list[float]) -> None:
        """Add them to lists."""
        before, queued_before = self._at, self._queued_at
        self._at, self._queued_at = self._now()
        ran.append((self._at - before) * 1e6)
        if queued_before is not None and self._queued_at is not None:
            queued.append((self._queued_at - queued_before) * 1e6)


def _threads() -> dict[int, float]:
    """Seconds of each thread of Python's, where the system tells."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return {threading.get_ident(): time.thread_time()}
    found = {}
    for thread in threading.enumerate():
        # A dummy stands for a thread that Python did not start, and outlasts it: to ask for its clock would crash.
        if thread.ident is not None and not isinstance(thread, threading._DummyThread):
            try:
                found[thread.ident] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            except OSError:  # It has just ended.
                continue
    return found


def _workers(seconds: Callable[[int], float]) -> dict[int, float]:
    """Of each process that `multiprocessing` started here; 0 where the system does not tell."""
    found = {}
    for process in multiprocessing.active_children():
        try:
            found[process.pid or 0] = seconds(process.pid or 0)
        except (OSError, ValueError, IndexError):
            found[process.pid or 0] = 0.0
    return found


def _since(before: Mapping[int, float], seconds: Callable[[int], float]) -> list[float]:
    return [now - before[who] for who, now in _workers(seconds).items() if who in before]


def _processor_seconds(pid: int) -> float:
    # After the command's name, which may hold anything: utime and stime are the 12th and 13th.
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _queued_seconds(pid: int) -> float:
    """How long its threads could have run, and had no processor."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text("utf-8").split()[1]) for thread in threads) / 1e9


def threads_beside(ident: int) -> list[str]:
    """The other threads that are at a line of the user's, with that line, beside those that wait for a third one."""
    busy = [other for other, frame in sys._current_frames().items() if frame.f_code.co_filename != threading.__file__]
    return [named for other in busy if other != ident and " at " in (named := _name(other))]


def _name(ident: int) -> str:
    """The thread's name, and the line of the user's that it is at."""
    name = next((thread.name for thread in threading.enumerate() if thread.ident == ident), "a thread")
    for frame in outwards(sys._current_frames().get(ident)):
        if is_user_file(path := Path(frame.f_code.co_filename)):
            return f"{name} at {file_name(str(path))}:{frame.f_lineno}"
    return name
