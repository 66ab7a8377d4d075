"""Sums of rows or elements at indices along one dimension, in fp32 by atomic additions."""

from __future__ import annotations

import torch

from tilewright.kernels.by_recipe import by_triton
from tilewright.kernels.index_sums import triton
from tilewright.kernels.registration import define


def index_sums(source: torch.Tensor, index: torch.Tensor, extent: int, wraps: bool = False) -> torch.Tensor:
    """out[o, e, d] = Σ source[o, p, d] over the p with index[o, p, d] = e; zeros where no index is e.

    source: floating point [O, P, D]; index: int64 or int32 of the same shape (may be expanded), each in [0, extent), or
    with `wraps` in [-extent, extent), where negative ones count from the end. The result is fp32 [O, extent, D]
    (float64 for float64). On a GPU fp32, bf16 and fp16 run in Triton: the order of the additions, and so the last bits,
    differ between runs, and an index out of bounds stops the device. Others run in PyTorch, which raises RuntimeError
    on a CPU. It has no derivative.

    >>> index_sums(torch.tensor([[[1.0], [2.0], [4.0]]]), torch.tensor([[[2], [0], [-1]]]), 3, True)
    tensor([[[2.],
             [0.],
             [5.]]])
    """
    return _index_sums(source, index, extent, wraps)  # type: ignore[no-any-return]


def _by_torch(source: torch.Tensor, index: torch.Tensor, extent: int, wraps: bool) -> torch.Tensor:
    wide, places = source.to(_dtype(source)), index.long()
    if wraps:
        places = torch.where(places < 0, places + extent, places)
    return wide.new_zeros((source.shape[0], extent, source.shape[2])).scatter_add_(1, places, wide)


def _dtype(source: torch.Tensor) -> torch.dtype:
    return torch.float64 if source.dtype == torch.float64 else torch.float32


def _fake(source: torch.Tensor, index: torch.Tensor, extent: int, wraps: bool) -> torch.Tensor:
    return source.new_empty((source.shape[0], extent, source.shape[2]), dtype=_dtype(source))


_index_sums = define("index_sums", _by_torch, _fake, recipe=by_triton(triton.recipe))
__all__ = ["index_sums"]
