"""One launch of a kernel, and the elements that its programs accessed."""

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
    """The name of the kernel's parameter."""
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Access:
    """One load or store of a block of elements."""

    operand: str
    direction: Literal["read", "write"]
    ranges: tuple[Range, ...]
    """Along each axis of the operand; empty if no element was accessed or the operand has no axes."""
    elements: int
    """Lanes whose mask was true."""
    lanes: int
    shape: tuple[int, ...]
    """The block's shape in the kernel."""
    offsets: Range = field(default=(0, 0), compare=False)
    """The first and the last element, counted in the operand's memory from its first one."""
    line: int = field(default=0, compare=False)
    """The line of the kernel, counted from the first of its source; 0 where it is not known."""


@dataclass(frozen=True)
class ProgramAccesses:
    """The accesses of one program of a launch, in order."""

    program: Grid
    accesses: tuple[Access, ...]


@dataclass(frozen=True)
class LaunchRecord:
    """One kernel on its grid; shared bytes are per block, times in microseconds."""

    name: str
    language: Literal["triton", "gluon", "cuda", "library"]
    place: str
    """`file.py:12`, or the library."""
    grid: Grid
    threads: int
    """Per block."""
    capability: str
    """Compute capability it was compiled for, `9.0`."""
    registers: int
    stack_bytes: int
    """Per thread, in local memory: spilled registers, or arrays indexed at run time."""
    shared_bytes: int
    operands: tuple[Operand, ...] = ()
    scalars: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, str] = field(default_factory=dict)
    """Compile-time parameters: block sizes, `num_warps`, ..."""
    source: str = ""
    ptx: str = ""
    sass: str = ""
    measured_us: float | None = None
    note: str = ""
    """Which fields are unknown, and why."""

    @property
    def programs(self) -> int:
        x, y, z = self.grid
        return x * y * z
