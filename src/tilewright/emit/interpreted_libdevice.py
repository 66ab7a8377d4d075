"""The functions of libdevice that generated kernels call, for Triton's interpreter, which lacks them: by PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from triton.language.extra import libdevice

FUNCTIONS = (
    "acos",
    "asin",
    "atan",
    "atan2",
    "cosh",
    "erfc",
    "exp",
    "expm1",
    "log10",
    "log1p",
    "pow",
    "rsqrt",
    "sinh",
    "tan",
    "tanh",
)
"""libdevice's functions of fp32 and fp64."""


def install() -> None:
    """Give these functions to this process, whose kernels are interpreted."""
    for name in FUNCTIONS:
        setattr(libdevice, name, functools.partial(_computed, getattr(torch, name)))
    libdevice.fast_log2f = functools.partial(_computed, torch.log2)


def _computed(function: Callable[..., torch.Tensor], *operands: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle

    values = function(*(torch.tensor(x.handle.data) for x in operands)).numpy()
    dtype = operands[0].dtype
    return tl.tensor(TensorHandle(values, dtype), tl.block_type(dtype, list(values.shape)))
