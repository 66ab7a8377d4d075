"""Rows of a tensor as its kernels see them: two dimensions, one stride, and how they lie in memory."""

from __future__ import annotations

from typing import Literal

import torch

Edges = Literal["WHOLE", "RAGGED", "LOOSE"]
VECTOR = 16
"""Bytes that a thread loads at once."""
LONG_ROW = 32768
"""Bytes from which the vectors of a row are counted from a line's beginning, so that a warp's lie in whole lines."""
ELEMENTS = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""What `row.cuh` calls the dtypes that the kernels take."""


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """`x` as rows of its last dimension, elements side by side, any stride from row to row.

    Not copied where such a view exists; any other layout is made contiguous. `x` has elements.
    """
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1] if x.dim() else 1)
    return rows if rows.shape[1] == 1 or rows.stride(1) == 1 else rows.contiguous()


def line_of(columns: int, itemsize: int) -> int:
    """Bytes whose multiples a row's first vector begins at: a vector's, or in long rows a cache line's."""
    return 128 if columns * itemsize >= LONG_ROW else VECTOR


def edges(*rows: torch.Tensor, line: int | None = None) -> Edges:
    """How the rows of tensors [N, M] of one shape and dtype lie, together, as `row.cuh` names it; LINE is `line_of`'s
    where it is not given."""
    first = rows[0]
    itemsize, start = first.element_size(), first.data_ptr()
    line = line or line_of(first.shape[1], itemsize)
    # One row has no next one, whatever its stride says.
    strides = [x.stride(0) * itemsize for x in rows] if len(first) > 1 else [0] * len(rows)
    for other, stride in zip(rows[1:], strides[1:], strict=True):
        if (other.data_ptr() - start) % VECTOR or (stride - strides[0]) % VECTOR:
            return "LOOSE"
    whole = start % line == 0 and strides[0] % line == 0 and first.shape[1] * itemsize % VECTOR == 0
    return "WHOLE" if whole else "RAGGED"


def vectors_of(columns: int, itemsize: int, lie: Edges) -> int:
    """The most vectors that a row of so many columns takes, counted from its line's beginning."""
    before = line_of(columns, itemsize) // itemsize - 1 if lie == "RAGGED" else 0
    return -(-(columns + before) * itemsize // VECTOR)
