"""The operators that are traced as those of their formulas.

    y = _euclidean_dist(a, b)   →   y = sqrt(clamp_min(matmul(a', b'), 0))    a', b': with squares of their rows beside

PyTorch runs such a formula as so many kernels; here what is around the product is fused. `cdist` of many rows calls it.

    y = pow(mask, True)         →   y = clone(mask)                           ones_like for False

PyTorch's fake tensors take this power of booleans for integers; its kernels give booleans.

    y = reflection_pad3d(x, …)  →   y = clone(reflection_pad3d(clone(x), …), channels last)       for channels-last x

PyTorch's kernels for CPUs keep that layout; its fake tensors do not (of 4 dimensions those of 2.11).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tilewright.graph import foreach


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """By operator, as AOTAutograd takes them; list operators among them."""
    from torch._decomp import get_decompositions

    distances = dict(get_decompositions([torch.ops.aten._euclidean_dist]))
    pads = [f"{kind}_pad{axes}d" for kind in ("reflection", "replication") for axes in (2, 3)]
    padded = {(pad := getattr(torch.ops.aten, name).default): functools.partial(_padded, pad) for name in pads}
    return foreach.by_tensor() | distances | padded | {torch.ops.aten.pow.Tensor_Scalar: _power}


def _power(x: torch.Tensor, exponent: complex) -> Any:
    if x.dtype is not torch.bool or not isinstance(exponent, bool):
        return NotImplemented
    return x.clone() if exponent else torch.ones_like(x)


def _padded(pad: Callable[..., torch.Tensor], x: torch.Tensor, padding: Any) -> Any:
    layout = torch._prims_common.suggest_memory_format(x)
    if layout is torch.contiguous_format or x.device.type != "cpu":
        return NotImplemented
    return pad(x.contiguous(), padding).contiguous(memory_format=layout)
