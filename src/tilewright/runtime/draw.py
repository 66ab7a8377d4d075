"""Advances PyTorch's CPU generator by a whole draw; kernels compute the numbers from the state before it."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from tilewright.kernels.dropout_add.stream import SHAPE
from tilewright.runtime.executable import OneResult, Slots, fill, slots_in

_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


# The thread that held the lock when the process was forked does not exist in the child.
os.register_at_fork(after_in_child=_renew_lock)

Taker = Callable[[int, int, int], None]
"""`tw_take`: address of the generator's state, number of elements drawn, address of the stream."""


@dataclass
class DrawStep(OneResult):
    """Advances PyTorch's generator by a draw; its result is the stream: the state before the draw."""

    take: Taker
    size: Any
    """The shape of the draw; an extent may be a `Slot`."""

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(slots_in(self.size))

    @staticmethod
    def taker(library: ctypes.CDLL) -> Taker:
        """The function `tw_take` of a library whose kernels draw."""
        take: Any = library.tw_take
        take.restype = None
        take.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
        found: Taker = take
        return found

    def run(self, slots: Slots) -> None:
        elements = prod(fill(self.size, slots))
        stream = torch.empty(SHAPE, dtype=torch.int32)
        with _lock:
            _take(self.take, elements, stream)
        slots[self.output] = stream


def _take(take: Taker, elements: int, stream: torch.Tensor) -> None:
    generator = torch.default_generator
    while True:
        before = generator.get_state()
        after = before.clone()
        take(after.data_ptr(), elements, stream.data_ptr())
        # Retry if another thread drew meanwhile: PyTorch's draws do not take this lock.
        if torch.equal(generator.get_state(), before):
            generator.set_state(after)
            return
