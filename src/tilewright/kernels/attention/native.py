"""What `attention.cpp` is told of a kind of call: layouts, launches, and the driver's functions."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tilewright.kernels import nvrtc
from tilewright.kernels.attention import dispatch
from tilewright.kernels.attention.hopper import backward as hopper_backward
from tilewright.kernels.attention.hopper import forward as hopper_forward
from tilewright.kernels.attention.hopper.chain import Layout
from tilewright.kernels.attention.hopper.launch import RANK
from tilewright.kernels.attention.request import Request
from tilewright.launch.extension import Extension

EXTENSION = Extension(Path(__file__).parent / "attention.cpp", "small attention costs the host more in Python")
ELSEWHERE = -1
"""In place of a size of scratch: the backward is not done natively."""


class Driver(ctypes.Structure):
    """`Driver` of attention.cpp: addresses of functions, and the context of the device."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("launch", "encode", "make_current", "stream_of", "context"))


class Lies(ctypes.Structure):
    """`Lies` of attention.cpp: a dense tensor."""

    _fields_ = (("sizes", ctypes.c_int64 * RANK), ("strides", ctypes.c_int64 * RANK))


class Course(ctypes.Structure):
    """`Course` of attention.cpp."""

    _fields_ = (
        ("driver", Driver),
        ("forward", Layout),
        ("backward", Layout),
        ("tensor", Lies * 4),
        ("scratch", ctypes.c_int64),
        ("sink", ctypes.c_uint64),
    )


def course(
    module: ModuleType,
    request: Request,
    operands: Sequence[torch.Tensor],
    forward: hopper_forward.Bound,
    trained: bool,
    sink: torch.Tensor | None,
    otherwise: Callable[..., Any],
) -> Any:
    """What `module.attend` and `module.gradients` take first, for every call of `request`.

    Args:
        operands: q, k and v of one such call.
        trained: whether the backward is wanted too.
        sink: memory for a log-sum-exp that nobody asked for.
        otherwise: dq, dk and dv of (dout, dlse, q, k, v, out, lse), one of the first two None: for what is not done
            natively.
    """
    q, _, v = operands
    made = Course(driver=driver_of(forward.device), forward=forward.chain.layout, scratch=ELSEWHERE)
    # What `dispatch` does after the launches where one key is seen is left to it.
    if trained and not request.single_key and dispatch.select(request, "auto", True) is hopper_backward:
        backward = hopper_backward.bound(request)
        made.backward, made.scratch = backward.chain.layout, backward.scratch
    gradients = (dispatch.empty_gradient(x) for x in operands)
    layouts = dispatch.strides_like(q, v.shape[3]), *((x.shape, x.stride()) for x in gradients)
    for place, (sizes, strides) in enumerate(layouts):
        made.tensor[place] = Lies(tuple(sizes), tuple(strides))
    made.sink = 0 if sink is None else sink.data_ptr()
    return module.course(ctypes.addressof(made), otherwise)


@functools.cache
def driver_of(device: int) -> Driver:
    """CUDA's functions, and PyTorch's for its current stream. Raises CompilerError where one is missing."""
    functions = (nvrtc.cuda_function(name) for name in ("cuLaunchKernel", "cuTensorMapEncodeTiled", "cuCtxSetCurrent"))
    return Driver(*functions, nvrtc.stream_function(), nvrtc.primary_context(device))
