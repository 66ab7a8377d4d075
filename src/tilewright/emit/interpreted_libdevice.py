"""What generated kernels need and Triton's interpreter lacks: functions of libdevice, by PyTorch, and bounds of loops
that are arguments of the kernel, which it passes as arrays of one element."""

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
    """Give them to this process, whose kernels are interpreted."""
    from triton.runtime import interpreter

    for name in FUNCTIONS:
        setattr(libdevice, name, functools.partial(_computed, getattr(torch, name)))
    libdevice.fast_log2f = functools.partial(_computed, torch.log2)
    interpreter._patch_lang_tensor = functools.partial(_with_index, interpreter._patch_lang_tensor)


def _with_index(patch: Callable[..., None], tensor: Any, scope: Any) -> None:
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _computed(function: Callable[..., torch.Tensor], *operands: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle

    values = function(*(torch.tensor(x.handle.data) for x in operands)).numpy()
    dtype = operands[0].dtype
    return tl.tensor(TensorHandle(values, dtype), tl.block_type(dtype, list(values.shape)))
