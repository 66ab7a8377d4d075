"""How many blocks of a kernel are resident on a multiprocessor, what limits them, and the waves of a grid.

Closed formulas of NVIDIA's occupancy calculator (`cuda_occupancy.h`, and "CUDA C++ Programming Guide", tables of
features and technical specifications per compute capability). They say what fits, not how fast it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tilewright.hardware.architectures import Architecture
from tilewright.records.errors import UsageError

WARP = 32
_REGISTER_UNIT = 256
"""Registers are allocated to a warp in units of this many, on every architecture from 7.0 on."""
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
    """Blocks that each resource alone would allow."""

    @property
    def limited_by(self) -> tuple[Resource, ...]:
        """The resources that allow no further block; there may be several."""
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
    # Warps are dealt to the partitions in turn, so a block needs room for a multiple of four warps.
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
    """A grid on a device: `programs` in waves of `slots`, the programs that are resident at once."""

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
        """Waves, a partial last one counted as whole."""
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
        """Time, in full waves, if a program takes as long alone as beside others on its multiprocessor.

        This holds for programs bound by latency: a last wave of one program lasts as long as a full one.
        """
        return float(self.turns)

    @property
    def shared_waves(self) -> float:
        """Time, in full waves, if the programs of a multiprocessor share one saturated unit.

        Programs are dealt to the multiprocessors in turn, so the busiest has ⌈programs / SMs⌉ of them.
        """
        return -(-self.programs // self.sms) / self.blocks_per_sm

    def time(self, alone: float, full: float) -> float:
        """How long the grid takes, where one program alone takes `alone` and a full wave `full`.

        Programs of a wave slow each other through L2, memory and power, so a partial last wave is faster: its time is
        linear in the share of slots taken, from `alone` to `full` (at least `alone`). With both equal this is a
        staircase.

        >>> Waves(programs=198, sms=132, blocks_per_sm=1).time(alone=8.0, full=10.0)
        19.0
        """
        if not self.programs:
            return 0.0
        return (self.turns - 1) * full + alone + (full - alone) * self.last / self.slots

    def tail(self, waves: float) -> float:
        """Extra time of a grid that takes `waves` because slots idle: 0.5 is 50 % more than with none idle."""
        return waves / self.waves - 1 if self.programs else 0.0
