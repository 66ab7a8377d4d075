"""A pool of host memory for outputs and temporaries.

The first write to a fresh page takes several times as long as a write to a warm one, and a large `malloc` returns fresh
pages every time. The pool keeps the pages: a block returns to it when the last tensor on it is freed, be it held by
autograd, a view or another thread. Blocks of 2 MB and more are aligned to huge pages. Idle bytes are at most twice the
peak of the live bytes; `trim` returns them to the system.

Live bytes are those requested: the rest of a block's size class is address space that is never touched.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from tilewright.measure.memory import register_pool

SMALL = 1024 * 1024
"""PyTorch allocates smaller tensors: glibc keeps such blocks, too, and its allocation is 4 µs faster."""
HUGE_PAGE = 2 * 1024 * 1024
SPARE = 2
"""Idle bytes per live byte at the peak: enough that programs whose blocks vary in size map none anew."""


class Pool:
    """Blocks of host memory by size class. Thread-safe; usable after `fork` (pages are copied on write)."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a block may die while this thread is inside
        self._idle: dict[int, deque[tuple[int, mmap.mmap]]] = {}
        self._types: dict[int, type[ctypes.Array[ctypes.c_char]]] = {}
        self._meter = register_pool(lambda: self.live_bytes)
        self.live_bytes = 0
        self.peak_bytes = 0
        self.idle_bytes = 0

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, extent: int) -> torch.Tensor:
        """An uninitialised CPU tensor; `extent` is the number of elements that its storage spans."""
        nbytes = extent * dtype.itemsize
        if nbytes < SMALL:
            return torch.empty_strided(shape, strides, dtype=dtype)
        block = self._take(size_class(nbytes), nbytes)
        whole = torch.frombuffer(block, dtype=dtype, count=extent)
        # Set the storage instead of returning a view, so that autograd lets a caller write to it. Do not touch the
        # storage from Python: autograd would then accumulate a second gradient out of place.
        return torch.empty(0, dtype=dtype).set_(whole, 0, shape, strides)  # type: ignore[call-overload, no-any-return]

    def after_fork(self) -> None:
        """Renew the lock: a thread that held it when the process was forked does not exist in the child."""
        self._lock = threading.RLock()

    def trim(self) -> int:
        """Return every idle block to the system; returns the bytes released."""
        with self._lock:
            released = self.idle_bytes
            for blocks in self._idle.values():
                while blocks:
                    blocks.pop()[1].close()
            self.idle_bytes = 0
            return released

    def _take(self, size: int, wanted: int) -> ctypes.Array[ctypes.c_char]:
        with self._lock:
            idle = self._idle.setdefault(size, deque())
            if idle:
                address, mapping = idle.pop()
                self.idle_bytes -= size
            else:
                address, mapping = _map(size)
            self.live_bytes += wanted
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            block = self._type(size).from_address(address)
            block.home = (wanted, address, mapping)  # type: ignore[attr-defined]
        self._meter.changed()
        return block

    def _type(self, size: int) -> type[ctypes.Array[ctypes.c_char]]:
        """The buffer class of one size; deleting an instance returns its block to the pool."""
        if size not in self._types:

            def give_back(block: Any, pool: Pool = self) -> None:
                pool._give(size, *block.home)

            base = ctypes.c_char * size
            self._types[size] = type("Block", (base,), {"__del__": give_back})
        return self._types[size]

    def _give(self, size: int, wanted: int, address: int, mapping: mmap.mmap) -> None:
        with self._lock:
            self.live_bytes -= wanted
            if self.idle_bytes + size <= SPARE * self.peak_bytes:
                self._idle[size].append((address, mapping))
                self.idle_bytes += size
            else:
                mapping.close()
        self._meter.changed()


def size_class(nbytes: int) -> int:
    """`nbytes` rounded up to one of eight sizes between powers of two, in whole pages: at most 12.5 % is wasted."""
    step = max(1 << max(nbytes.bit_length() - 4, 0), mmap.PAGESIZE)
    return -(-nbytes // step) * step


def _map(size: int) -> tuple[int, mmap.mmap]:
    huge = size >= HUGE_PAGE
    mapping = mmap.mmap(-1, size + (HUGE_PAGE if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    return (-(-address // HUGE_PAGE) * HUGE_PAGE if huge else address), mapping


pool = Pool()
"""The pool of this process."""
os.register_at_fork(after_in_child=pool.after_fork)
