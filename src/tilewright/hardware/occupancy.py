"""How many blocks of a kernel live on a multiprocessor at once, what limits them, and how a grid falls into waves.

Closed formulas of NVIDIA's occupancy calculator (`cuda_occupancy.h`, and "CUDA C++ Programming Guide", tables of
features and technical specifications per compute capability). They say what fits, not how fast it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tilewright.hardware.architectures import Architecture
from tilewright.records.errors import UsageError

WARP = 32
_REGISTER_UNIT = 256
"""Registers are handed out to a warp in units of so many, on every architecture from 7.0 on."""
_PARTITIONS = 4
"""Each multiprocessor is four partitions with a quarter of the registers; a warp stays in one."""

Resource = Literal["registers", "shared memory", "threads", "blocks"]


@dataclass(frozen=True)
class Occupancy:
    """Blocks of one kernel that are resident on one multiprocessor at once."""

    blocks: int
    warps: int
    share: float
    """Resident warps over the most that the multiprocessor holds."""
    limits: Mapping[Resource, int]
    """How many blocks each resource alone would allow."""

    @property
    def limited_by(self) -> tuple[Resource, ...]:
        """The resources that allow no further block; several may run out together."""
        return tuple(resource for resource, blocks in self.limits.items() if blocks == self.blocks)


def occupancy(sm: Architecture, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Occupancy of a kernel of `threads` a block, `registers` a thread and `shared_bytes` a block.

    `shared_bytes` is static and dynamic together. Zero blocks mean that the kernel cannot be launched.
    UsageError for a block of no threads.

    >>> from tilewright.hardware.architectures import architecture
    >>> a100 = architecture("8.0")
    >>> occupancy(a100, threads=256, registers=64, shared_bytes=0).limited_by
    ('registers',)
    >>> occupancy(a100, 256, 64, 0).share
    0.5
    """
    if threads < 1:
        raise UsageError(f"a block has at least one thread, not {threads}")
    warps = -(-threads // WARP)
    limits: dict[Resource, int] = {
        "registers": _by_registers(sm, warps, registers),
        "shared memory": _by_shared(sm, shared_bytes),
        "threads": sm.max_threads // WARP // warps if threads <= sm.max_threads_per_block else 0,
        "blocks": sm.max_blocks,
    }
    blocks = min(limits.values())
    return Occupancy(blocks, blocks * warps, blocks * warps * WARP / sm.max_threads, limits)


def _by_registers(sm: Architecture, warps: int, registers: int) -> int:
    if registers > sm.max_registers_per_thread:
        return 0
    of_a_warp = _round_up(max(registers, 1) * WARP, _REGISTER_UNIT)
    # A block's warps go round the partitions, so one block alone must fit as if it filled its last round.
    if of_a_warp * _round_up(warps, _PARTITIONS) > sm.registers:
        return 0
    return sm.registers // _PARTITIONS // of_a_warp * _PARTITIONS // warps


def _by_shared(sm: Architecture, shared_bytes: int) -> int:
    if shared_bytes > sm.shared_bytes_per_block:
        return 0
    taken = _round_up(max(shared_bytes + sm.shared_reserved, 1), sm.shared_unit)
    return sm.shared_bytes // taken


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True)
class Waves:
    """A grid over a device: `programs` in turns of `slots`, the programs that are resident at once."""

    programs: int
    sms: int
    blocks_per_sm: int

    @property
    def slots(self) -> int:
        return self.sms * self.blocks_per_sm

    @property
    def waves(self) -> float:
        """Programs over slots; the part after the point is the last wave."""
        return self.programs / self.slots

    @property
    def turns(self) -> int:
        """Waves, the last one counted whole."""
        return -(-self.programs // self.slots)

    @property
    def last(self) -> int:
        """Programs in the last wave."""
        return self.programs - (self.turns - 1) * self.slots if self.programs else 0

    @property
    def idle(self) -> float:
        """Share of the slots that the last wave leaves empty.

        >>> Waves(programs=140, sms=132, blocks_per_sm=1).idle  # 8 of 132 work
        0.9393939393939394
        """
        return 1 - self.last / self.slots if self.programs else 0.0

    @property
    def alone_waves(self) -> float:
        """Time, in full waves, where a program takes as long alone as beside others on its multiprocessor.

        So it is while each waits on its own latency: a last wave of one program lasts as long as a full one.
        """
        return float(self.turns)

    @property
    def shared_waves(self) -> float:
        """Time, in full waves, where the programs of a multiprocessor share one saturated unit.

        Programs are dealt round the multiprocessors, so the busiest has ⌈programs / SMs⌉ of them.
        """
        return -(-self.programs // self.sms) / self.blocks_per_sm

    def time(self, alone: float, full: float) -> float:
        """How long the grid takes, where one program alone takes `alone` and a full wave `full`.

        Programs of a wave slow each other through what all share (L2, memory, power), and a last wave of few
        programs is quicker for it: linear between the two in the share of slots taken. With `alone` equal to
        `full` this is a staircase; `full` is at least `alone`.

        >>> Waves(programs=198, sms=132, blocks_per_sm=1).time(alone=8.0, full=10.0)
        19.0
        """
        if not self.programs:
            return 0.0
        return (self.turns - 1) * full + alone + (full - alone) * self.last / self.slots

    def tail(self, waves: float) -> float:
        """What the tail adds to a grid that takes `waves`: 0.5 is half as long again as if none idled."""
        return waves / self.waves - 1 if self.programs else 0.0
