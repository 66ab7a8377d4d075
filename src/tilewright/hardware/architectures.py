"""What each GPU architecture holds and can do: the only table that knows compute capabilities apart.

Sizes: "CUDA C++ Programming Guide", tables of features and technical specifications per compute capability.
`limits_of` gives a device's row, with what the device itself reports, as plain data for a kernel's plan.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tilewright.records.errors import UsageError

if TYPE_CHECKING:
    import torch

KIB = 1024


@dataclass(frozen=True)
class Architecture:
    """A compute capability: what one multiprocessor holds, and which instructions it has. Sizes in bytes."""

    capability: str
    max_threads: int
    max_blocks: int
    shared_bytes: int
    shared_bytes_per_block: int
    """The most that one block may ask for."""
    shared_unit: int
    shared_reserved: int
    """What the system takes of it for every block."""
    registers: int = 65536
    max_registers_per_thread: int = 255
    max_threads_per_block: int = 1024
    max_cluster: int = 1
    """Blocks that every device of the architecture puts in one cluster; 1: it has no clusters."""
    tensor_copies: bool = False
    """Bulk copies through tensor maps (TMA)."""
    wgmma: bool = False
    """Asynchronous products of a warpgroup, with operands in shared memory."""

    @property
    def target(self) -> str:
        """What NVRTC and ptxas compile for. wgmma belongs to the `a` set, which runs on this architecture alone.

        >>> architecture("9.0").target, architecture("12.0").target
        ('sm_90a', 'sm_120')
        """
        return f"sm_{self.capability.replace('.', '')}{'a' if self.wgmma else ''}"


def _hopper_and_later(capability: str, threads: int, blocks: int, shared_kib: int, wgmma: bool = False) -> Architecture:
    return Architecture(
        capability, threads, blocks, shared_kib * KIB, (shared_kib - 1) * KIB, 128, KIB,
        max_cluster=8, tensor_copies=True, wgmma=wgmma,
    )  # fmt: skip


_ARCHITECTURES = {
    row.capability: row
    for row in (
        Architecture("7.5", 1024, 16, 64 * KIB, 64 * KIB, 256, 0),
        Architecture("8.0", 2048, 32, 164 * KIB, 163 * KIB, 128, KIB),
        Architecture("8.6", 1536, 16, 100 * KIB, 99 * KIB, 128, KIB),
        Architecture("8.9", 1536, 24, 100 * KIB, 99 * KIB, 128, KIB),
        _hopper_and_later("9.0", 2048, 32, 228, wgmma=True),
        _hopper_and_later("10.0", 2048, 32, 228),
        _hopper_and_later("10.3", 2048, 32, 228),
        _hopper_and_later("12.0", 1536, 24, 100),
        _hopper_and_later("12.1", 1536, 24, 100),
    )
}


def architecture(capability: str) -> Architecture:
    """The architecture of a compute capability (`9.0`); UsageError lists the known ones.

    >>> architecture("8.6").max_blocks
    16
    """
    found = known(capability)
    if found is None:
        raise UsageError(
            f"occupancy of compute capability {capability!r} is not known, only of {', '.join(_ARCHITECTURES)}"
        )
    return found


def known(capability: str) -> Architecture | None:
    """`architecture`, or None for a compute capability that is not in the table."""
    return _ARCHITECTURES.get(capability)


class DeviceLimits(NamedTuple):
    """What a kernel's plan asks of a device: plain and hashable, so that a plan for one can be kept."""

    capability: str
    """Compute capability, `9.0`; empty for the CPU, where kernels are interpreted."""
    multiprocessors: int
    shared_bytes_per_block: int
    """The most shared memory that one block may ask for."""
    max_cluster: int = 1
    """Blocks that every device of the architecture puts in one cluster; 1: no clusters."""
    tensor_copies: bool = False
    """Bulk copies through tensor maps (TMA)."""
    wgmma: bool = False
    """Asynchronous products of a warpgroup, with operands in shared memory."""


INTERPRETER = DeviceLimits("", multiprocessors=2, shared_bytes_per_block=2**31)
"""Triton's interpreter: every block fits, and two programs are enough to have more than one."""


@functools.cache
def limits_of(device: torch.device) -> DeviceLimits:
    """The limits of a GPU, from its driver and the table; `INTERPRETER` for a CPU.

    An architecture that is not in the table has the instructions that all have.
    """
    if device.type != "cuda":
        return INTERPRETER
    import torch

    properties = torch.cuda.get_device_properties(device)
    major, minor = torch.cuda.get_device_capability(device)
    capability = f"{major}.{minor}"
    # PyTorch's stubs do not name the second.
    sizes = properties.multi_processor_count, properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    row = known(capability)
    if row is None:
        return DeviceLimits(capability, *sizes)
    return DeviceLimits(capability, *sizes, row.max_cluster, row.tensor_copies, row.wgmma)
