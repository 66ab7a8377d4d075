"""Deterministic sums of elements at indices within each row: the gradient of a gather."""

from __future__ import annotations

import torch

from tilewright.kernels.device import DTYPES, at_least_fp32
from tilewright.kernels.registration import define
from tilewright.kernels.scatter_sums import cuda
from tilewright.launch import nvrtc
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe


def scatter_sums(source: torch.Tensor, index: torch.Tensor, extent: int) -> torch.Tensor:
    """out[…, j] = Σ source[…, k] over the k with index[…, k] = j; zeros where no index is j.

    source: floating point [*, K]; index: int64 or int32 of the same shape (may be expanded), each in [0, extent). The
    result is [*, extent] of source's dtype, summed in at least fp32. On a GPU fp32, bf16 and fp16 with up to
    `cuda.MOST` elements in a result's row run in CUDA C++, and an index out of bounds stops the device; others run in
    PyTorch, which raises RuntimeError on a CPU. It has no derivative.

    >>> scatter_sums(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[2, 0, 2]]), 4)
    tensor([[2., 0., 5., 0.]])
    """
    return _scatter_sums(source, index, extent)  # type: ignore[no-any-return]


def _by_torch(source: torch.Tensor, index: torch.Tensor, extent: int) -> torch.Tensor:
    wide = at_least_fp32(source)
    total = wide.new_zeros((*source.shape[:-1], extent))
    return total.scatter_add_(-1, index.long(), wide).to(source.dtype)


def _recipe(call: RecipeBuilder, source: Operand, index: Operand, extent: int) -> Recipe | None:
    if not source.is_cuda or source.dtype not in DTYPES or not nvrtc.available(source.device.index):
        return None
    return cuda.recipe(call, source, index, extent)


_scatter_sums = define(
    "scatter_sums",
    _by_torch,
    lambda source, index, extent: source.new_empty((*source.shape[:-1], extent)),
    recipe=_recipe,
)
__all__ = ["scatter_sums"]
