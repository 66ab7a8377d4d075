"""How the Hopper forward cuts a call into tiles: the constants of each build, and the build that a request takes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from tilewright.hardware.architectures import DeviceLimits
from tilewright.kernels.attention.request import Request

Masked = Literal["never", "last", "diagonal", "any"]
"""Which key blocks of a tile need a mask: none; only the last; only the last, which begins at the position of the
tile's first query; or any."""
NO_LIMIT = 1 << 30
"""A side of a band without limit: beyond every difference of two positions."""
ROWS = 64
"""Queries of a warpgroup."""
WIDEST = 256
"""The largest head size."""
FEW_TILES = 264
"""Tiles of one warpgroup that an H200 runs at once, two on each of 132 multiprocessors."""
SHORT = 512
"""Keys up to which a tile of one warpgroup pays."""


@dataclass(frozen=True)
class Tiles:
    """One build of the kernel: the constants of its code."""

    head_size: int
    """Padded: 64, 128 or 256."""
    block: int
    """Keys of a block."""
    consumers: int
    """Warpgroups that compute, 64 queries each; with one of them, two programs share a multiprocessor."""
    stages: int
    """Slots of the ring of key blocks, and of that of value blocks."""
    registers: int
    """Registers of a thread of a consumer warpgroup."""
    masked: Masked
    banded: bool
    """Whether a query's position hides keys from it: causal or a window."""
    table: bool
    """Whether a table in memory assigns tiles to programs."""
    half: bool
    """fp16 rather than bf16."""
    capped: bool = False
    """Whether there is a soft cap."""
    q_in_registers: bool = False
    """Whether Q is kept in registers: a third less traffic of shared memory in Q Kᵀ."""
    own_output: bool = True
    """Whether the result has its own shared memory; else it overwrites Q."""
    late_wait: bool = True
    """Whether the wait for P V comes after the softmax that hides it."""

    @property
    def programs_per_multiprocessor(self) -> int:
        """Programs that share a multiprocessor."""
        return 2 if self.consumers == 1 else 1

    @property
    def may_skip_block(self) -> bool:
        """Whether the last key block of a tile may be hidden from all of a warpgroup's queries."""
        return self.banded and self.consumers == 3


def tiles_for(request: Request, table: bool) -> Tiles:
    """The fastest build for a request on an H200; docs/experiments.md has the figures."""
    widest, banded = max(request.head_size, request.value_size), request.banded
    build = functools.partial(
        Tiles, banded=banded, table=table, half=request.dtype == torch.float16, capped=request.softcap > 0
    )
    if widest > 128:
        masked = _masked(request, row_block=128, key_block=64)
        return build(256, 64, consumers=2, stages=2, registers=240, masked=masked, own_output=False)
    if widest <= 64 and request.keys >= (2048 if banded else 1024):
        masked = _masked(request, row_block=192, key_block=128)
        return build(64, 128, consumers=3, stages=2, registers=160, masked=masked, late_wait=False)
    head_size = 64 if widest <= 64 else 128
    tiles = request.batch * request.heads * -(-request.queries // ROWS)
    if request.keys <= SHORT and tiles <= FEW_TILES:
        block = 128 if head_size == 64 and request.keys > SHORT // 2 else 64
        masked = _masked(request, row_block=ROWS, key_block=block)
        return build(head_size, block, consumers=1, stages=2, registers=232, masked=masked, q_in_registers=True)
    masked = _masked(request, row_block=128, key_block=128)
    return build(
        head_size, 128, consumers=2, stages=2, registers=240, masked=masked, q_in_registers=True, late_wait=banded
    )


def needs_wgmma(limits: DeviceLimits) -> str | None:
    """Why the kernels of this folder do not run on a device, or None."""
    return None if limits.wgmma else f"needs a GPU with wgmma instructions, which {limits.name} lacks"


def band(request: Request) -> tuple[int, int]:
    """left, right: query i sees the keys from i + left to i + right."""
    shift = request.keys - request.queries
    left = -NO_LIMIT if request.left is None else max(shift - request.left, -NO_LIMIT)
    return left, NO_LIMIT if request.right is None else min(shift + request.right, NO_LIMIT)


def _masked(request: Request, row_block: int, key_block: int) -> Masked:
    if not request.banded:
        return "last" if request.keys % key_block else "never"
    if request.left is not None or row_block != key_block or band(request)[1] % key_block:
        return "any"
    return "diagonal" if request.right == 0 else "last"
