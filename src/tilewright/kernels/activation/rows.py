"""How tensors of one shape are walked by the kernels: rows of neighbouring elements."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.kernels import row
from tilewright.launch.builder import Operand, RecipeBuilder


@dataclass(frozen=True)
class Rows:
    """`count` rows of `columns` neighbours, one stride for each tensor."""

    tensors: tuple[Operand, ...]
    count: int
    columns: int
    strides: tuple[int, ...]
    """Elements from one row of each tensor to its next."""


def rows_of(call: RecipeBuilder, *tensors: Operand) -> Rows:
    """Contiguous tensors as one long row; else rows along the last dimension, of any stride.

    A tensor whose rows have no one stride, or whose last dimension is not of neighbours, is copied.
    """
    first = tensors[0]
    if all(tensor.is_contiguous() for tensor in tensors):
        return Rows(tensors, 1, first.numel(), (first.numel(),) * len(tensors))
    matrices = tuple(row.rows_of(call, tensor) for tensor in tensors)
    count, columns = matrices[0].shape
    return Rows(matrices, count, columns, tuple(matrix.stride(0) for matrix in matrices))
