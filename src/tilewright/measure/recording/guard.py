"""Interrupts a recording before it fills the memory, however long a step is and whatever it calls."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable

_POLL_SECONDS = 0.01
_POLLS_KEPT = 10


class Guard:
    """Calls `full` on the main thread, between two of its bytecodes, once a limit is reached. What that raises, such
    as SystemExit, is raised again in the main thread soon after, without its message.

    A limit is a time from now, or growth of the memory that this process holds from `malloc`: a profiler keeps
    its events there. What a program takes and gives back within a tenth of a second does not count, nor what it
    held already while it was looked at by `learn`; what else it keeps does, since nobody can tell the two apart.
    A thread watches, and leaves a pending call for the main one. A signal would not do: Python's handlers also run
    within functions in C that look for signals, and the profiler's own do; to stop it from there never returns.
    Where the main thread does not begin the recording, or the C library has no `mallinfo2` (glibc 2.33), nothing
    can be stopped in the middle: `works` is False, and the guard does nothing.
    """

    def __init__(self, full: Callable[[], None]) -> None:
        self._full = full
        self.works = threading.current_thread() is threading.main_thread() and _mallinfo is not None
        self._deadline = float("inf")
        self._bytes = float("inf")
        self._learning = False
        self._usual = 0
        self._held: deque[int] = deque(maxlen=_POLLS_KEPT)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._main = threading.get_ident()
        self._raised: type[BaseException] | None = None
        # Python keeps no reference to what is pending.
        self._pending = _PENDING_CALL(self._call)

    def learn(self) -> None:
        """From now on, until the next `watch`: what the program holds is what it usually holds."""
        self._learning = True
        self._held.clear()
        self._start()

    def watch(self, *, seconds: float = float("inf"), nbytes: float = float("inf")) -> None:
        """From now on, until `rest`: `full` is called after that time or that growth, once."""
        self._learning = False
        self._held.clear()
        self._bytes = max(held_bytes(), self._usual) + nbytes
        self._deadline = time.monotonic() + seconds
        self._start()

    def rest(self) -> None:
        """Nothing is watched until the next `watch`."""
        self._learning = False
        self._deadline = self._bytes = float("inf")

    def close(self) -> None:
        """End the thread."""
        self.rest()
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _start(self) -> None:
        if self.works and self._thread is None:
            self._thread = threading.Thread(target=self._poll, name="tilewright-guard", daemon=True)
            self._thread.start()

    def _poll(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            if self._raised is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._main), ctypes.py_object(self._raised))
                self._raised = None
            if self._learning or self._bytes < float("inf"):
                self._held.append(held_bytes())
            kept = min(self._held) if len(self._held) == _POLLS_KEPT else 0
            if self._learning:
                self._usual = max(self._usual, kept)
            elif kept > self._bytes or time.monotonic() > self._deadline:
                self.rest()
                ctypes.pythonapi.Py_AddPendingCall(self._pending, None)

    def _call(self, _: object) -> int:
        try:
            self._full()
        except BaseException as error:
            # Nothing passes through a pending call; the watching thread has it raised in the program.
            self._raised = type(error)
        return 0


_PENDING_CALL = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


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
