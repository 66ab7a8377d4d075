"""The operators that are traced as those of their formulas.

    y = _euclidean_dist(a, b)   →   y = sqrt(clamp_min(matmul(a', b'), 0))    a', b': with squares of their rows beside

PyTorch runs such a formula as so many kernels; here what is around the product is fused. `cdist` of many rows calls it.

    y = pow(mask, True)         →   y = clone(mask)                           ones_like for False

PyTorch's fake tensors take this power of booleans for integers; its kernels give booleans.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tilewright.capture import foreach
from tilewright.capture.result_strides import laid_out_as_eager


@functools.cache
def decompositions(*, on_cpu: bool = True) -> dict[Any, Callable[..., Any]]:
    """By operator, as AOTAutograd takes them; list operators among them, and `on_cpu` those of `result_strides`."""
    from torch._decomp import get_decompositions

    distances = dict(get_decompositions([torch.ops.aten._euclidean_dist]))
    laid_out = dict(laid_out_as_eager()) if on_cpu else {}
    return foreach.by_tensor() | distances | laid_out | {torch.ops.aten.pow.Tensor_Scalar: _power}


def _power(x: torch.Tensor, exponent: complex) -> Any:
    if x.dtype is not torch.bool or not isinstance(exponent, bool):
        return NotImplemented
    return x.clone() if exponent else torch.ones_like(x)
