"""One launch of a kernel, and what its programs were seen to touch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Grid = tuple[int, int, int]
Range = tuple[int, int]
"""First and last index, both included."""


@dataclass(frozen=True)
class Operand:
    """A tensor that a kernel was launched with; strides in elements."""

    name: str
    """The kernel's parameter."""
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Access:
    """One load or store of a block of elements."""

    operand: str
    direction: Literal["read", "write"]
    ranges: tuple[Range, ...]
    """Along each axis of the operand; empty where nothing was touched, or the operand has no axes."""
    elements: int
    """Lanes that the mask let through."""
    lanes: int
    shape: tuple[int, ...]
    """Of the block, in the kernel."""


@dataclass(frozen=True)
class Walk:
    """What one program of a launch touched, in order."""

    program: Grid
    accesses: tuple[Access, ...]


@dataclass(frozen=True)
class Launch:
    """One kernel on its grid; bytes are of a block, times in microseconds."""

    name: str
    language: Literal["triton", "gluon", "cuda", "cpp", "library"]
    place: str
    """`file.py:12`, or the library."""
    grid: Grid
    threads: int
    """Of a block."""
    capability: str
    """Compute capability it was compiled for, `9.0`."""
    registers: int
    stack_bytes: int
    """Of a thread, in local memory: spilled registers, or arrays indexed at run time."""
    shared_bytes: int
    operands: tuple[Operand, ...] = ()
    scalars: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, str] = field(default_factory=dict)
    """What the compiler was told: block sizes, `num_warps`, ..."""
    source: str = ""
    ptx: str = ""
    sass: str = ""
    measured_us: float | None = None
    note: str = ""
    """What is not known of it, and why."""

    @property
    def programs(self) -> int:
        x, y, z = self.grid
        return x * y * z
