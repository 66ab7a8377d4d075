"""Interrupts a recording that exceeds a bound of memory or time, also in the middle of a step."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from tilewright.measure.recording.processor_time import threads_beside

_POLL_SECONDS = 0.01
_POLLS_KEPT = 10


class RecordingGuard:
    """Calls `on_limit` on the main thread, between two of its bytecodes, once a limit is reached. An exception of
    `on_limit`, such as SystemExit, is raised in the main thread soon after, without its message.

    A limit is a time from now, or growth of the memory that this process has allocated by `malloc`: the profiler
    keeps its events there. Not counted: memory that is freed within a tenth of a second, and the level seen during
    `learn`. Other memory that the program keeps counts, since it cannot be told apart from the profiler's.
    A thread polls the limits and schedules a pending call on the main thread. A signal handler would deadlock:
    it can run inside the profiler's C++ functions, and stopping the profiler from there never returns. The thread
    lives only while there is something to watch: when PyTorch's profiler starts and stops with stacks, it borrows the
    state of each Python thread in turn, and a thread that runs meanwhile crashes the process.
    `works` is False, and the guard does nothing, if the recording does not begin on the main thread or the C library
    has no `mallinfo2` (glibc 2.33).
    """

    def __init__(self, on_limit: Callable[[], None]) -> None:
        self._on_limit = on_limit
        self.works = threading.current_thread() is threading.main_thread() and _mallinfo is not None
        self._deadline = float("inf")
        self._bytes = float("inf")
        self._learning = False
        self._usual = 0
        self._excused = 0
        self._due = False
        self._held: deque[int] = deque(maxlen=_POLLS_KEPT)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._main = threading.get_ident()
        self._beside: Counter[str] = Counter()
        # Python keeps no reference to a pending call.
        self._pending = _PENDING_CALL(self._call)

    @property
    def beside(self) -> str:
        """The other thread, and the line of the user's, that was met most often while something was watched."""
        return next((thread for thread, _ in self._beside.most_common(1)), "")

    def learn(self) -> None:
        """Until the next `watch`, record how much memory the program usually holds."""
        self._learning = True
        self._held.clear()
        self._start()

    def watch(self, *, seconds: float = float("inf"), nbytes: float = float("inf")) -> None:
        """Until `rest`, call `on_limit` once after that time or that growth of memory.

        It waits for a thread that it starts; call it outside of a step.
        """
        self._learning = False
        self._held.clear()
        self._bytes = max(held_bytes(), self._usual) + nbytes
        self._deadline = time.monotonic() + seconds
        self._start()

    def rest(self) -> None:
        """Watch nothing until the next `watch`; no thread of the guard runs after this."""
        self._learning = False
        self._deadline = self._bytes = float("inf")
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None

    def forget(self) -> None:
        """Watch nothing, in a child of a fork, where the thread does not exist."""
        self._thread = None
        self._deadline = self._bytes = float("inf")

    @contextmanager
    def excused(self) -> Iterator[None]:
        """While inside, interrupt nothing; the time that passes and the memory that is kept do not count."""
        held, began = held_bytes(), time.monotonic()
        self._excused += 1
        try:
            yield
        finally:
            self._bytes += max(0, held_bytes() - held)
            self._deadline += time.monotonic() - began
            self._held.clear()
            self._excused -= 1

    def _start(self) -> None:
        if self.works and self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._poll, name="tilewright-guard", daemon=True)
            self._thread.start()

    def _poll(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            if self._excused:
                continue
            with suppress(RuntimeError):  # A thread has just ended.
                self._beside.update(threads_beside(self._main))
            if self._learning or self._bytes < float("inf"):
                self._held.append(held_bytes())
            kept = min(self._held) if len(self._held) == _POLLS_KEPT else 0
            if self._learning:
                self._usual = max(self._usual, kept)
            elif (kept > self._bytes or time.monotonic() > self._deadline) and not self._due:
                self._due = True
                ctypes.pythonapi.Py_AddPendingCall(self._pending, None)

    def _call(self, _: object) -> int:
        self._due = False
        if self._excused:
            return 0
        self.rest()
        try:
            self._on_limit()
        except BaseException as error:
            # A pending call cannot raise; a thread raises this in the main thread after the call.
            threading.Thread(target=self._raise, args=(type(error),), daemon=True).start()
        return 0

    def _raise(self, kind: type[BaseException]) -> None:
        while _is_calling(sys._current_frames().get(self._main)):
            time.sleep(_POLL_SECONDS)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._main), ctypes.py_object(kind))


def _is_calling(frame: FrameType | None) -> bool:
    """Whether a thread is in the pending call."""
    while frame is not None:
        if frame.f_code is RecordingGuard._call.__code__:
            return True
        frame = frame.f_back
    return False


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
    """Bytes that this process has allocated by `malloc`, mapped blocks included; 0 without `mallinfo2`."""
    if _mallinfo is None:
        return 0
    info = _mallinfo()
    return int(info.uordblks) + int(info.hblkhd)
