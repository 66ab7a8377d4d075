"""How tensors of one shape are walked by the kernels: rows of neighbouring elements."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rows:
    """`count` rows of `columns` neighbours, one stride for each tensor."""

    tensors: tuple[torch.Tensor, ...]
    count: int
    columns: int
    strides: tuple[int, ...]
    """Elements from one row of each tensor to its next."""


def rows_of(*tensors: torch.Tensor) -> Rows:
    """Contiguous tensors as one long row; else rows along the last dimension, of any stride.

    A tensor whose rows have no one stride, or whose last dimension is not of neighbours, is copied.
    """
    first = tensors[0]
    if all(tensor.is_contiguous() for tensor in tensors):
        return Rows(tensors, 1, first.numel(), (first.numel(),) * len(tensors))
    columns = first.shape[-1]
    matrices = [tensor.reshape(-1, columns) for tensor in tensors]
    matrices = [matrix if columns == 1 or matrix.stride(1) == 1 else matrix.contiguous() for matrix in matrices]
    return Rows(tuple(matrices), first.numel() // columns, columns, tuple(matrix.stride(0) for matrix in matrices))
