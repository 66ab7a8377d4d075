"""Sums of elements at computed places of each row, the same at every run: what a gather's gradient is."""

from __future__ import annotations

import torch

from tilewright.kernels.device import DTYPES
from tilewright.kernels.registration import define
from tilewright.kernels.scatter_sums import cuda
from tilewright.launch import nvrtc
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe


def scatter_sums(source: torch.Tensor, index: torch.Tensor, extent: int) -> torch.Tensor:
    """out[…, j] = Σ source[…, k] over the k with index[…, k] = j; zeros where no index is j.

    source: floating point [*, K]; index: int64 or int32, the same shape, each in [0, extent), which an expanded tensor
    may be; the result is [*, extent] of source's dtype. Sums in at least fp32. On a GPU fp32, bf16 and fp16 of up to
    `cuda.MOST` elements of a result's row run in CUDA C++, where an index outside stops the device; all others run in
    PyTorch, whose CPU raises RuntimeError. It has no derivative.

    >>> scatter_sums(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[2, 0, 2]]), 4)
    tensor([[2., 0., 5., 0.]])
    """
    return _scatter_sums(source, index, extent)  # type: ignore[no-any-return]


def _by_torch(source: torch.Tensor, index: torch.Tensor, extent: int) -> torch.Tensor:
    wide = source if source.dtype == torch.float64 else source.float()
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
