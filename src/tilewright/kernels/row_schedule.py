"""How a kernel of rows (norms, softmax, cross entropy) shares them out: plain data, decided from metadata alone."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch

from tilewright.hardware.architectures import DeviceLimits, limits_of
from tilewright.kernels.device import interpreted, runs_triton
from tilewright.kernels.row import VECTOR, Alignment
from tilewright.launch import nvrtc
from tilewright.launch.builder import Operand

Storage = Literal["registers", "ring", "tma", "stream"]
CLUSTERS = (1, 2, 4, 8, 16)
"""Blocks that may share a row."""
IMPLS = ("auto", "torch", "triton", "cuda")
"""Implementations of an operator on rows. `auto`: CUDA C++ where it can be built, else Triton, else PyTorch."""


@dataclass(frozen=True)
class Schedule:
    """One build of a kernel of rows. The sources see the fields as macros of the same names in capitals."""

    threads: int
    """Threads of a block that compute."""
    row_threads: int
    """Threads that share a row: all of a block, or a power of two within a warp."""
    vectors: int
    """Vectors of 16 bytes that a thread has of a row at once."""
    cluster: int = 1
    """Blocks that share a row."""
    blocks: int = 1
    """Blocks that a multiprocessor must hold at once: bounds the registers of a thread."""
    storage: Storage = "registers"
    """Where a row waits between its passes: `registers`; a `ring` of `stages` vectors a thread; slots for
    `stages` rows, filled by `tma`; or nowhere: a `stream` of `vectors` at a time, read again for a second pass."""
    stages: int = 0
    block_vectors: int = 0
    """With `tma`: vectors of a row that a block has at most."""
    alignment: Alignment = "ALIGNED"
    line: int = VECTOR
    """Bytes on whose multiples a row's first vector begins."""
    shared_bytes: int = 0
    """Dynamic shared memory of a block."""
    waves: int = 1
    """Programs to launch at most, in multiples of those that run at once; more let early blocks make room."""

    @property
    def rows_per_block(self) -> int:
        """Rows that a program has at a time."""
        return self.threads // self.row_threads

    def programs(self, rows: int) -> int:
        """Programs that take all rows once."""
        return -(-rows // self.rows_per_block)

    def definitions(self) -> tuple[tuple[str, int | str], ...]:
        """The macros that `row.cuh` and the kernels read."""
        return tuple((name.upper(), getattr(self, name)) for name in _MACROS)


_MACROS = (
    "threads", "row_threads", "vectors", "cluster", "blocks", "stages", "block_vectors", "alignment", "line",
)  # fmt: skip


def no_kernel(device: torch.device) -> str | None:
    """Why no CUDA C++ kernel of rows runs on a GPU, so that Triton's do; or None."""
    limits = limits_of(device)
    if limits.max_cluster == 1:
        return f"compute capability {limits.capability} has no thread-block clusters"
    return None if nvrtc.available(device.index) else "the package cuda-bindings is missing"


def kernels_for(package: str, x: Operand, impl: str, longest: float = math.inf) -> ModuleType | None:
    """The module of `package` whose kernels take rows like those of x; None where PyTorch's operators do.

    `longest`: bytes of a row that its CUDA C++ kernels take.
    Raises ValueError where `impl` is not of `IMPLS`.
    """
    if impl not in IMPLS:
        raise ValueError(f"{package.rpartition('.')[2]}: impl must be one of {', '.join(IMPLS)}, not {impl!r}")
    if x.numel() == 0 or impl == "torch" or (impl == "auto" and not runs_triton(x)):
        return None
    holds = x.shape[-1] * x.itemsize <= longest
    if impl == "cuda" and not holds:
        raise NotImplementedError(f"the CUDA C++ kernels take rows of up to {longest} bytes")
    if impl == "auto":
        impl = "cuda" if holds and x.is_cuda and not interpreted() and no_kernel(x.device) is None else "triton"
    # Imported here, since Triton exists on Linux alone.
    return importlib.import_module(f"{package}.{impl}")


def short_rows(vectors: int, each: int) -> Schedule:
    """For rows of so few vectors: as few threads a row, of a warp at most, as leave a thread no more than `each`."""
    row_threads = next((threads for threads in (1, 2, 4, 8, 16) if each * threads >= vectors), 32)
    return Schedule(128, row_threads, -(-vectors // row_threads))


def blocks_for(threads: int, data: int) -> int:
    """Blocks of a multiprocessor: 64 registers a thread where up to 32 hold data, else 128."""
    return 1024 // threads if data <= 32 else -(-512 // threads)


def room_of(blocks: int, limits: DeviceLimits) -> int:
    """Bytes of shared memory that a block may have where a multiprocessor holds so many."""
    return min(limits.shared_bytes_per_block, limits.shared_bytes // blocks - limits.shared_reserved)
