"""The resources and instructions of each GPU architecture: the only table that tells them apart.

Sources: "CUDA C++ Programming Guide" 13.0, tables of features, technical specifications and arithmetic throughput per
compute capability; `cuda_occupancy.h` of CUDA 13.0; the tuning guides of Hopper and Blackwell for clusters of 16; AMD's
white papers and instruction sets of CDNA 2, 3 and 4.
`limits_of` gives a device's row, with what the device itself reports, as plain data for a kernel's plan.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilewright.records.errors import UsageError

if TYPE_CHECKING:
    import torch

KIB = 1024


@dataclass(frozen=True)
class Architecture:
    """A compute capability: what one multiprocessor holds, and which instructions it has. Sizes in bytes."""

    capability: str
    """`9.0`; of an AMD GPU `gfx942`."""
    max_threads: int
    max_blocks: int
    shared_bytes: int
    shared_bytes_per_block: int
    """The most that one block may ask for."""
    shared_unit: int = 128
    shared_reserved: int = KIB
    """Bytes of shared memory that the driver reserves for each block."""
    registers: int = 65536
    max_registers_per_thread: int = 255
    max_threads_per_block: int = 1024
    max_cluster: int = 1
    """The most blocks of a cluster that is portable to every device of the architecture; 1: it has no clusters."""
    largest_cluster: int = 1
    """The most blocks of a cluster if a kernel asks for more than is portable."""
    tensor_copies: bool = False
    """Bulk copies through tensor maps (TMA)."""
    wgmma: bool = False
    """Asynchronous products of a warpgroup, with operands in shared memory."""
    warp_size: int = 32
    cuda: bool = True
    """It runs CUDA C++ and NVIDIA's libraries."""
    flops_per_transcendental: int = 16
    """fp32 FLOPs in the time of one special function: two for each multiply-add, over 16 special functions a cycle."""

    @property
    def number(self) -> int:
        """The capability as Triton and nvcc write it: 90 for `9.0`."""
        return int(self.capability.replace(".", ""))

    @property
    def target(self) -> str:
        """The target of NVRTC and ptxas. wgmma belongs to the `a` set, which runs on this architecture alone.

        >>> architecture("9.0").target, architecture("12.0").target
        ('sm_90a', 'sm_120')
        """
        return f"sm_{self.number}{'a' if self.wgmma else ''}"


def _before_ampere(capability: str, threads: int, blocks: int, shared_kib: int) -> Architecture:
    shared_bytes = shared_kib * KIB
    return Architecture(capability, threads, blocks, shared_bytes, shared_bytes, 256, 0, flops_per_transcendental=8)


def _from_ampere(capability: str, threads: int, blocks: int, shared_kib: int, **features: Any) -> Architecture:
    return Architecture(capability, threads, blocks, shared_kib * KIB, (shared_kib - 1) * KIB, **features)


def _from_hopper(
    capability: str, threads: int, blocks: int, shared_kib: int, largest_cluster: int, wgmma: bool = False
) -> Architecture:
    return _from_ampere(
        capability, threads, blocks, shared_kib,
        max_cluster=8, largest_cluster=largest_cluster, tensor_copies=True, wgmma=wgmma,
    )  # fmt: skip


def _cdna(capability: str, shared_kib: int, flops_per_transcendental: int) -> Architecture:
    """A compute unit: four SIMD units of eight waves of 64; special functions run at a quarter of 64 lanes a cycle."""
    shared_bytes = shared_kib * KIB
    return Architecture(
        capability, 2048, 32, shared_bytes, shared_bytes, 512, 0, registers=4 * 512 * 64, max_registers_per_thread=512,
        warp_size=64, cuda=False, flops_per_transcendental=flops_per_transcendental,
    )  # fmt: skip


_ARCHITECTURES = {
    row.capability: row
    for row in (
        _before_ampere("7.0", 2048, 32, 96),  # Volta
        _before_ampere("7.2", 2048, 32, 96),
        _before_ampere("7.5", 1024, 16, 64),  # Turing
        _from_ampere("8.0", 2048, 32, 164, flops_per_transcendental=8),  # Ampere
        _from_ampere("8.6", 1536, 16, 100),
        _from_ampere("8.7", 1536, 16, 164),
        _from_ampere("8.9", 1536, 24, 100),  # Ada
        _from_hopper("9.0", 2048, 32, 228, 16, wgmma=True),  # Hopper
        _from_hopper("10.0", 2048, 32, 228, 16),  # Blackwell
        _from_hopper("10.3", 2048, 32, 228, 16),
        _from_hopper("11.0", 1536, 24, 228, 8),
        _from_hopper("12.0", 1536, 24, 100, 8),
        _from_hopper("12.1", 1536, 24, 100, 8),
        _cdna("gfx90a", 64, 8),
        _cdna("gfx942", 64, 16),
        _cdna("gfx950", 160, 16),
    )
}


def architecture(capability: str) -> Architecture:
    """The architecture of a compute capability (`9.0`); UsageError lists the known ones.

    >>> architecture("8.6").max_blocks
    16
    """
    found = known(capability)
    if found is None:
        raise UsageError(f"compute capability {capability!r} is not known, only {', '.join(_ARCHITECTURES)}")
    return found


def known(capability: str | None) -> Architecture | None:
    """`architecture`, or None where there is no compute capability or the table lacks it."""
    return None if capability is None else _ARCHITECTURES.get(capability)


@dataclass(frozen=True)
class DeviceLimits(Architecture):
    """One device: its architecture with what the device reports. A kernel's plan depends on it, so it is hashable."""

    multiprocessors: int = 1
    l2_bytes: int = 0

    @property
    def name(self) -> str:
        """For reasons: `compute capability 9.0`, or `the CPU`."""
        return f"compute capability {self.capability}" if self.capability else "the CPU"


INTERPRETER = DeviceLimits("", 2048, 32, 0, shared_bytes_per_block=2**31, multiprocessors=2)
"""Triton's interpreter: every block fits, and two programs are enough to have more than one."""


@functools.cache
def limits_of(device: torch.device) -> DeviceLimits:
    """The limits of a GPU, from its driver and the table; `INTERPRETER` for a CPU.

    An architecture that is not in the table has the instructions that all have.
    """
    if device.type != "cuda":
        return INTERPRETER
    import torch

    return reported_limits(torch.cuda.get_device_properties(device))


def reported_limits(properties: Any) -> DeviceLimits:
    """The limits in what `torch.cuda.get_device_properties` returned, with the table's features."""
    capability = f"{properties.major}.{properties.minor}"
    reported = {
        "shared_bytes_per_block": properties.shared_memory_per_block_optin,
        "shared_bytes": properties.shared_memory_per_multiprocessor,
        "registers": properties.regs_per_multiprocessor,
        "max_threads": properties.max_threads_per_multi_processor,
        "max_threads_per_block": properties.max_threads_per_block,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "warp_size": properties.warp_size,
    }
    row = known(capability) or Architecture(capability, 2048, 32, 0, 0)
    return DeviceLimits(**vars(row) | reported)


def stated_limits(capability: str, multiprocessors: int, l2_bytes: int) -> DeviceLimits:
    """The limits of a device that is not there, from the table; UsageError for an unknown capability.

    >>> stated_limits("9.0", multiprocessors=132, l2_bytes=60 * 2**20).shared_bytes_per_block
    232448
    """
    row = architecture(capability)
    return DeviceLimits(**vars(row), multiprocessors=multiprocessors, l2_bytes=l2_bytes)
