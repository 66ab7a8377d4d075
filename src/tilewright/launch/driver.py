"""The addresses of the CUDA driver's functions, which the executor and its Python twin call."""

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
    """`Driver` of native/recipe.h for CUDA device number `device`: addresses, last the context's handle.

    Raises CompilerError where the driver or a function is missing.
    """
    pytorch = str(Path(torch.__file__).parent / "lib/libtorch_cuda.so")
    functions = [address("libcuda.so.1", name) for name in FUNCTIONS]
    return *functions, address(pytorch, CURRENT_STREAM), primary_context(device)


@functools.cache
def address(library: str, name: str) -> int:
    """Where a function of a shared library lies. Raises CompilerError where it is missing."""
    try:
        function = getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError) as error:
        raise CompilerError(f"{library} has no {name}: {error}") from error
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def make_current(device: int) -> None:
    """Give this thread the context that the whole process shares on device number `device`."""
    cuda = ctypes.CDLL("libcuda.so.1")
    _check(cuda.cuCtxSetCurrent(ctypes.c_void_p(primary_context(device))), "cuCtxSetCurrent")


@functools.cache
def primary_context(device: int) -> int:
    """Handle of the context that the whole process shares on device number `device`."""
    cuda = ctypes.CDLL("libcuda.so.1")
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _check(cuda.cuDeviceGet(ctypes.byref(number), device), "cuDeviceGet")
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number), "cuDevicePrimaryCtxRetain")
    return context.value or 0


def _check(status: int, function: str) -> None:
    if status:
        raise CompilerError(f"{function} failed with CUDA error {status}")
