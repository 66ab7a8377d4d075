"""Views tensors as rows [rows, columns] with one row stride, and describes their alignment."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from tilewright.launch.builder import Operand, RecipeBuilder

Alignment = Literal["ALIGNED", "PEELED", "SHIFTED"]
"""How rows are read in vectors, by the names of `row.cuh`."""
VECTOR = 16
"""Bytes that a thread loads at once."""
LINE = 128
"""Bytes of a cache line."""
LONG_ROW = 32768
"""In rows of this many bytes or more, vectors are counted from the begin of a cache line, so that a warp loads whole
lines."""
ELEMENTS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The dtypes that the kernels support, by their names in `row.cuh`."""


class RowLayout(NamedTuple):
    """The layout of a matrix's rows: all that a schedule depends on."""

    address: int
    """Address of the first element, modulo `LINE`."""
    rows: int
    stride: int
    """Elements from row to row; for a single row its columns."""


def rows_of(call: RecipeBuilder, x: Operand) -> Operand:
    """`x` (not empty) as [rows, columns] of its last dimension, with adjacent columns and any row stride.

    A dense copy if no view has this form.
    """
    columns = x.shape[-1] if x.dim() else 1
    x = with_rows(call, x)
    return x.as_strided((x.numel() // columns, columns), (_row_stride(x) or 0, 1))


def with_rows(call: RecipeBuilder, x: Operand) -> Operand:
    """`x`, or a dense copy of it if `rows_of` has no view of it."""
    return call.copy(x) if _row_stride(x) is None else x


def _row_stride(x: Operand) -> int | None:
    """Elements from row to row (for a single row its columns); None if they vary or columns are not adjacent."""
    if x.dim() and x.shape[-1] > 1 and x.strides[-1] != 1:
        return None
    axes = [(size, stride) for size, stride in zip(x.shape[:-1], x.strides[:-1], strict=True) if size > 1]
    for (_, outer), (size, inner) in itertools.pairwise(axes):
        if outer != size * inner:
            return None
    return axes[-1][1] if axes else x.shape[-1] if x.dim() else 1


def layout_of(matrix: Operand) -> RowLayout:
    """The layout of a matrix [rows, columns] with adjacent columns."""
    rows, columns = matrix.shape
    return RowLayout(matrix.data_ptr() % LINE, rows, matrix.stride(0) if rows > 1 else columns)


def line_of(columns: int, itemsize: int) -> int:
    """The alignment in bytes of a row's first vector: a vector, or in long rows a cache line."""
    return LINE if columns * itemsize >= LONG_ROW else VECTOR


def alignment_of(columns: int, itemsize: int, layouts: Sequence[RowLayout], line: int | None = None) -> Alignment:
    """The common alignment of the rows of tensors of one dtype; the first layout is that of the kernel's result.

    `line` defaults to `line_of(columns, itemsize)`.
    """
    line = line or line_of(columns, itemsize)
    first = layouts[0]
    for other in layouts[1:]:
        if (other.address - first.address) % VECTOR:
            return "SHIFTED"
        # The stride of a single row has no meaning.
        if first.rows > 1 and (other.stride - first.stride) * itemsize % VECTOR:
            return "SHIFTED"
    step = first.stride * itemsize if first.rows > 1 else 0
    aligned = first.address % line == 0 and step % line == 0 and columns * itemsize % VECTOR == 0
    return "ALIGNED" if aligned else "PEELED"


def vectors_of(columns: int, itemsize: int, alignment: Alignment) -> int:
    """The most vectors of a row of `columns` elements, counted from the begin of its line."""
    before = 0 if alignment == "ALIGNED" else line_of(columns, itemsize) // itemsize - 1
    return -(-(columns + before) * itemsize // VECTOR)
