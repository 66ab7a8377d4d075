"""How kernels of rows (norms, softmax, cross entropy) divide rows among blocks and threads, as plain data."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch

from tilewright.hardware.architectures import DeviceLimits, limits_of
from tilewright.kernels.device import interpreted, runs_triton
from tilewright.kernels.row import VECTOR, Alignment
from tilewright.launch import nvrtc
from tilewright.launch.builder import Operand

Storage = Literal["registers", "tma", "stream"]
CLUSTERS = (1, 2, 4, 8, 16)
"""Blocks that may share a row."""
IMPLS = ("auto", "torch", "triton", "cuda")
"""Implementations of an operator on rows. `auto`: CUDA C++ where it can be built, else Triton, else PyTorch."""


@dataclass(frozen=True)
class Schedule:
    """One build of a kernel of rows. The sources see the fields as macros with the same names in capitals."""

    threads: int
    """Threads of a block that compute."""
    row_threads: int
    """Threads that share a row: all of a block, or a power of two within a warp."""
    vectors: int
    """Vectors of 16 bytes that a thread holds of a row at once."""
    cluster: int = 1
    """Blocks that share a row."""
    blocks: int = 1
    """Blocks that must fit a multiprocessor at once, which bounds the registers of a thread."""
    storage: Storage = "registers"
    """Where a row is kept between its passes: in `registers`; in slots for `stages` rows, filled by `tma`; or nowhere:
    a `stream` of `vectors` at a time, read again for a second pass."""
    stages: int = 0
    block_vectors: int = 0
    """With `tma`: the most vectors of a row that a block holds."""
    alignment: Alignment = "ALIGNED"
    line: int = VECTOR
    """Alignment of a row's first vector, in bytes."""
    shared_bytes: int = 0
    """Dynamic shared memory of a block."""
    waves: int = 1
    """The most programs to launch, as a multiple of those that run at once."""

    @property
    def rows_per_block(self) -> int:
        """Rows that a program processes at a time."""
        return self.threads // self.row_threads

    def programs(self, rows: int) -> int:
        """Programs needed for one pass over all rows."""
        return -(-rows // self.rows_per_block)

    def definitions(self) -> tuple[tuple[str, int | str], ...]:
        """The macros that `row.cuh` and the kernels read."""
        return tuple((name.upper(), getattr(self, name)) for name in _MACROS)


_MACROS = (
    "threads", "row_threads", "vectors", "cluster", "blocks", "stages", "block_vectors", "alignment", "line",
)  # fmt: skip


def no_kernel(device: torch.device) -> str | None:
    """Why CUDA C++ kernels of rows cannot run on a GPU, so that Triton's run; None if they can."""
    limits = limits_of(device)
    if limits.max_cluster == 1:
        return f"compute capability {limits.capability} has no thread-block clusters"
    return None if nvrtc.available(device.index) else "the package cuda-bindings is missing"


def kernels_for(package: str, x: Operand, impl: str) -> ModuleType | None:
    """The module of `package` with the kernels for rows like those of x; None if PyTorch's operators compute them.

    Raises ValueError if `impl` is not in `IMPLS`.
    """
    if impl not in IMPLS:
        raise ValueError(f"{package.rpartition('.')[2]}: impl must be one of {', '.join(IMPLS)}, not {impl!r}")
    if x.numel() == 0 or impl == "torch" or (impl == "auto" and not runs_triton(x)):
        return None
    if impl == "auto":
        impl = "cuda" if x.is_cuda and not interpreted() and no_kernel(x.device) is None else "triton"
    # Import late, since Triton exists only on Linux.
    return importlib.import_module(f"{package}.{impl}")


def short_rows(vectors: int, each: int) -> Schedule:
    """The schedule of rows of few vectors: the fewest threads per row (up to a warp) with at most `each` vectors."""
    row_threads = next((threads for threads in (1, 2, 4, 8, 16) if each * threads >= vectors), 32)
    return Schedule(128, row_threads, -(-vectors // row_threads))


def blocks_for(threads: int, data: int) -> int:
    """Blocks per multiprocessor with 64 registers per thread if at most 32 of them hold data, else with 128."""
    return 1024 // threads if data <= 32 else -(-512 // threads)


def room_of(blocks: int, limits: DeviceLimits) -> int:
    """The most shared memory of a block, in bytes, if a multiprocessor is to hold `blocks` of them."""
    return min(limits.shared_bytes_per_block, limits.shared_bytes // blocks - limits.shared_reserved)
