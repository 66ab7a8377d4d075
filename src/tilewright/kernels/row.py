"""Rows of a tensor as its kernels see them: two dimensions, one stride, and how they lie in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from tilewright.launch.builder import Operand, RecipeBuilder

Alignment = Literal["ALIGNED", "PEELED", "SHIFTED"]
"""How rows are read in vectors; the names are those of `row.cuh`."""
VECTOR = 16
"""Bytes that a thread loads at once."""
LINE = 128
"""Bytes of a cache line."""
LONG_ROW = 32768
"""Bytes from which the vectors of a row are counted from a line's beginning, so that a warp's lie in whole lines."""
ELEMENTS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""What `row.cuh` calls the dtypes that the kernels take."""


class RowLayout(NamedTuple):
    """Where the rows of a matrix lie: all that a schedule asks of a tensor."""

    address: int
    """Address of the first element, modulo `LINE`."""
    rows: int
    stride: int
    """Elements from row to row; of a single row its columns."""


def rows_of(call: RecipeBuilder, x: Operand) -> Operand:
    """`x`, which has elements, as rows of its last dimension: [rows, columns], adjacent columns, any row stride.

    A dense copy where it does not lie so.
    """
    columns = x.shape[-1] if x.dim() else 1
    rows = x.numel() // columns
    stride = _row_stride(x)
    if stride is None:
        x, stride = call.copy(x), columns
    return x.as_strided((rows, columns), (stride, 1))


def _row_stride(x: Operand) -> int | None:
    """Elements from row to row (of a single row its columns); None where they differ, or columns are not adjacent."""
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
    """Bytes whose multiples a row's first vector begins at: a vector's, or in long rows a cache line's."""
    return LINE if columns * itemsize >= LONG_ROW else VECTOR


def alignment_of(columns: int, itemsize: int, layouts: Sequence[RowLayout], line: int | None = None) -> Alignment:
    """How the rows of tensors of one dtype lie, together; the first layout is of what the kernel writes.

    `line` is `line_of`'s where it is not given.
    """
    line = line or line_of(columns, itemsize)
    first = layouts[0]
    for other in layouts[1:]:
        if (other.address - first.address) % VECTOR:
            return "SHIFTED"
        # One row has no next one, whatever its stride says.
        if first.rows > 1 and (other.stride - first.stride) * itemsize % VECTOR:
            return "SHIFTED"
    step = first.stride * itemsize if first.rows > 1 else 0
    aligned = first.address % line == 0 and step % line == 0 and columns * itemsize % VECTOR == 0
    return "ALIGNED" if aligned else "PEELED"


def vectors_of(columns: int, itemsize: int, alignment: Alignment) -> int:
    """The most vectors that a row of so many columns takes, counted from its line's beginning."""
    before = 0 if alignment == "ALIGNED" else line_of(columns, itemsize) // itemsize - 1
    return -(-(columns + before) * itemsize // VECTOR)
