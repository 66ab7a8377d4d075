"""A recipe: what one call of a GPU kernel allocates and launches, as plain data.

A GPU implementation of an operator is a function from metadata (shapes, strides, dtypes, addresses modulo `LINE`,
options, limits of the device) to a recipe. `launch/` runs recipes: eager calls, steps of compiled graphs, recordings of
CUDA graphs, the bench. `anatomy` reads their launches.

Tensors are numbered: the inputs first, then the buffers in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

LINE = 128
"""Bytes of a cache line. A recipe may depend on the addresses of its inputs modulo this."""


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory; strides in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    """A `torch.dtype`."""
    device: Any
    """A `torch.device` with its index."""
    is_unresolved: bool = False
    """Whether a tensor may be shown conjugated or negated: PyTorch's conjugate or negative bit says that its elements
    are not those in memory."""

    @cached_property
    def extent(self) -> int:
        """Elements that its storage spans."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


def is_expanded(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether several elements share an address, as in an expanded tensor (stride 0)."""
    return any(stride == 0 and size > 1 for size, stride in zip(shape, strides, strict=True))


def dense_strides(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides in elements of a tensor without gaps; `order` has its axes from the outermost in memory to the innermost.

    >>> dense_strides((2, 3, 4)), dense_strides((2, 3, 4), (1, 0, 2))
    ((12, 4, 1), (4, 8, 1))
    """
    strides, step = [0] * len(shape), 1
    for axis in reversed(range(len(shape)) if order is None else order):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


class Pointer(NamedTuple):
    """The address of a tensor, plus some bytes."""

    tensor: int
    offset: int = 0


class Number(NamedTuple):
    """A number in the format of one of `struct`'s letters."""

    format: str
    value: float


class Seed(NamedTuple):
    """The seed of the device's default generator, 64 bits."""


class Offset(NamedTuple):
    """Where the call's numbers begin in the generator's sequence, 64 bits."""


class TensorMap(NamedTuple):
    """A CUtensorMap of a tensor (CUDA driver API, cuTensorMapEncodeTiled); the innermost axis first."""

    tensor: int
    dtype: int
    """A CUtensorMapDataType."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes, of all axes but the innermost."""
    box: tuple[int, ...]
    swizzle: int
    promotion: int


class Structure(NamedTuple):
    """A structure passed by value, with addresses of tensors, seed and offset at some of its bytes."""

    data: bytes
    patches: tuple[tuple[int, Pointer | Seed | Offset], ...]


Argument = Pointer | Number | Seed | Offset | TensorMap | Structure


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    kernel: Any
    """An object with `function` (the driver's handle), `threads` and `shared_bytes`."""
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Copy:
    """A copy of the elements of one tensor into another of the same shape."""

    target: int
    source: int


@dataclass(frozen=True)
class Fill:
    """A write of one value to every element of a tensor, or to those of a part of it."""

    target: int
    value: float
    part: Layout | None = None
    offset: int = 0
    """Elements from the tensor's first element to the part's first."""


@dataclass(frozen=True)
class Recipe:
    """The steps of a call, valid for inputs that begin at `residues` modulo `modulus` bytes."""

    name: str
    device: Any
    residues: tuple[int, ...]
    """The address of each input modulo `modulus`, in bytes."""
    modulus: int
    buffers: tuple[Layout, ...]
    results: tuple[int, ...]
    """Which buffers are results, counted from the first buffer, in order."""
    actions: Sequence[Launch | Copy | Fill]
    advance: int = 0
    """How far the call advances the device's default generator, in steps of its offset."""
    keep: Sequence[Any] = field(default=())
    """Tensors whose addresses are among the numbers; they live as long as the recipe."""
