"""Interrupts a recording before it fills the memory, however long a step is and whatever it calls."""

from __future__ import annotations

import _thread
import ctypes
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType

_POLL_SECONDS = 0.01
_POLLS_KEPT = 10
# Real-time signals mean nothing to anybody unless a program gives them a meaning.
_SIGNAL = signal.Signals(signal.SIGRTMAX)


class Guard:
    """Calls `full` on the main thread, between two of its bytecodes, once a limit is reached.

    A limit is a time from now, or growth of the memory that this process holds from `malloc`: a profiler keeps
    its events there. What a program takes and gives back within a tenth of a second does not count; what it
    keeps does, since nobody can tell the two apart. A thread watches; no signal is sent, only its handler is
    made to run (`_thread.interrupt_main`), so that no system call of the program is cut short.
    Where the main thread does not begin the recording, or the C library has no `mallinfo2` (glibc 2.33), nothing
    can be stopped in the middle: `works` is False, and the guard does nothing.
    """

    def __init__(self, full: Callable[[], None]) -> None:
        self._full = full
        self.works = threading.current_thread() is threading.main_thread() and _mallinfo is not None
        self._deadline = float("inf")
        self._bytes = float("inf")
        self._held: deque[int] = deque(maxlen=_POLLS_KEPT)
        self._handler_before: object = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, *, seconds: float = float("inf"), nbytes: float = float("inf")) -> None:
        """From now on, until `rest`: `full` is called after that time or that growth, once."""
        if not self.works:
            return
        self._held.clear()
        self._bytes = held_bytes() + nbytes
        self._deadline = time.monotonic() + seconds
        if self._thread is None:
            self._handler_before = signal.signal(_SIGNAL, self._handle)
            self._thread = threading.Thread(target=self._poll, name="tilewright-guard", daemon=True)
            self._thread.start()

    def rest(self) -> None:
        """Nothing is watched until the next `watch`."""
        self._deadline = self._bytes = float("inf")

    def close(self) -> None:
        """End the thread and give the signal back."""
        self.rest()
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            # None: it was not installed from Python, and Python cannot put it back.
            signal.signal(_SIGNAL, self._handler_before or signal.SIG_DFL)  # type: ignore[arg-type]

    def _poll(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            if self._bytes < float("inf"):
                self._held.append(held_bytes())
            grown = len(self._held) == _POLLS_KEPT and min(self._held) > self._bytes
            if grown or time.monotonic() > self._deadline:
                self.rest()
                _thread.interrupt_main(_SIGNAL)

    def _handle(self, _: int, __: FrameType | None) -> None:
        self._full()


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc's malloc.h."""

    _fields_ = [  # ctypes reads it so
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def _find_mallinfo() -> Callable[[], _Mallinfo] | None:
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if found is not None:
        found.restype = _Mallinfo
    return found


_mallinfo = _find_mallinfo()


def held_bytes() -> int:
    """What this process holds from `malloc`, small blocks and those mapped alone; 0 where glibc cannot say."""
    if _mallinfo is None:
        return 0
    info = _mallinfo()
    return int(info.uordblks) + int(info.hblkhd)
