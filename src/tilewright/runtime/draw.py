"""Advances PyTorch's CPU generator by a whole draw, for kernels that compute the numbers from its saved state."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from tilewright.passes.random.draws import SHAPE
from tilewright.runtime.executable import OneResult, Slots, fill, slots_in

_one_at_a_time = threading.Lock()


def _free_the_lock() -> None:
    global _one_at_a_time
    _one_at_a_time = threading.Lock()


# A thread that drew while the process forked does not exist in the child.
os.register_at_fork(after_in_child=_free_the_lock)

Taker = Callable[[int, int, int], None]
"""Called with the addresses of the generator's state and of the stream, the elements between them."""


@dataclass
class DrawStep(OneResult):
    """Moves PyTorch's generator by a draw, and keeps the state that the draw begins with."""

    take: Taker
    size: Any
    """The shape that is drawn; an extent may be a slot."""

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(slots_in(self.size))

    @staticmethod
    def taker(library: ctypes.CDLL) -> Taker:
        """`tw_take` of a library whose kernels draw."""
        take: Any = library.tw_take
        take.restype = None
        take.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
        found: Taker = take
        return found

    def run(self, slots: Slots) -> None:
        elements = prod(fill(self.size, slots))
        stream = torch.empty(SHAPE, dtype=torch.int32)
        with _one_at_a_time:
            _take(self.take, elements, stream)
        slots[self.output] = stream


def _take(take: Taker, elements: int, stream: torch.Tensor) -> None:
    generator = torch.default_generator
    while True:
        before = generator.get_state()
        after = before.clone()
        take(after.data_ptr(), elements, stream.data_ptr())
        # PyTorch's own draws do not take this lock, so another thread may have drawn meanwhile.
        if torch.equal(generator.get_state(), before):
            generator.set_state(after)
            return
