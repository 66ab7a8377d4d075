"""Addresses of the CUDA driver's functions that the executor and its Python twin call."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from tilewright.records.errors import CompilerError

FUNCTIONS = ("cuLaunchKernel", "cuTensorMapEncodeTiled", "cuCtxSetCurrent", "cuStreamIsCapturing")
CURRENT_STREAM = "aoti_torch_get_current_cuda_stream"
"""PyTorch's `int f(int32_t device, void **stream)`."""


@functools.cache
def table(device: int) -> tuple[int, ...]:
    """The members of `Driver` (native/recipe.h) for CUDA device `device`: addresses, then the context's handle.

    Raises CompilerError if the driver or a function is missing.
    """
    pytorch = str(Path(torch.__file__).parent / "lib/libtorch_cuda.so")
    functions = [address("libcuda.so.1", name) for name in FUNCTIONS]
    return *functions, address(pytorch, CURRENT_STREAM), primary_context(device)


@functools.cache
def address(library: str, name: str) -> int:
    """The address of a function of a shared library. Raises CompilerError if it is missing."""
    try:
        function = getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError) as error:
        raise CompilerError(f"{library} has no {name}: {error}") from error
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def make_current(device: int) -> None:
    """Make the primary context of CUDA device `device` current in this thread."""
    cuda = ctypes.CDLL("libcuda.so.1")
    _check(cuda.cuCtxSetCurrent(ctypes.c_void_p(primary_context(device))), "cuCtxSetCurrent")


@functools.cache
def primary_context(device: int) -> int:
    """The handle of the primary context (one per process) of CUDA device `device`."""
    cuda = ctypes.CDLL("libcuda.so.1")
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _check(cuda.cuDeviceGet(ctypes.byref(number), device), "cuDeviceGet")
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number), "cuDevicePrimaryCtxRetain")
    return context.value or 0


def _check(status: int, function: str) -> None:
    if status:
        raise CompilerError(f"{function} failed with CUDA error {status}")
