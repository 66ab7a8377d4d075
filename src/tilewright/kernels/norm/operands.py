"""What the backward kernels of the norms read and write beside the sums over rows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Operands(NamedTuple):
    """In the order in which the kernels take them: matrices [rows, columns] of one dtype, the weight [columns], and
    the rows' mean (layer norm) and rstd in fp32."""

    x: Tensor
    dy: Tensor
    dsum: Tensor | None
    dx: Tensor
    weight: Tensor | None
    mean: Tensor
    rstd: Tensor

    def pointers(self) -> tuple[int, ...]:
        """Addresses, 0 for what there is not."""
        return tuple(map(pointer, self))

    def strides(self) -> tuple[int, int, int]:
        """Elements from row to row of x, dy and dsum."""
        return stride(self.x), stride(self.dy), stride(self.dsum)


def pointer(tensor: Tensor | None) -> int:
    """The tensor's address; 0 without one."""
    return 0 if tensor is None else tensor.data_ptr()


def stride(matrix: Tensor | None) -> int:
    """Elements from row to row, of a single row its columns; 0 without a matrix."""
    return 0 if matrix is None else (matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1])
