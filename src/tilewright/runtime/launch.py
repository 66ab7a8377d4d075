"""What `launch.cpp` is told of a Triton kernel among the steps of an executable."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tilewright.kernels.extension import Extension
from tilewright.kernels.nvrtc import cuda_function, primary_context, stream_function
from tilewright.runtime.executable import TensorSpec

EXTENSION = Extension(Path(__file__).parent / "launch.cpp", "compiled models cost the host more in Python")
MOST_INPUTS, MOST_RESULTS, MOST_SCRATCHES, MOST_KERNELS, MOST_AXES = 64, 16, 16, 2, 8
WARP = 32
Run = Callable[[list[Any]], bool]
"""Runs a step on the slots; False where a pointer is no multiple of 16 bytes, and nothing was done."""


@dataclass(frozen=True)
class Kernel:
    """One launch: a handle of the driver's, programs, threads of each, and their shared memory in bytes."""

    function: int
    programs: int
    threads: int
    shared_bytes: int


class Driver(ctypes.Structure):
    """`Driver` of launch.cpp: addresses of functions, and the context of the device."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("launch", "make_current", "stream_of", "context"))


class _Result(ctypes.Structure):
    _fields_ = (
        ("sizes", ctypes.c_int64 * MOST_AXES),
        ("strides", ctypes.c_int64 * MOST_AXES),
        *((name, ctypes.c_int32) for name in ("slot", "over", "dtype", "rank")),
    )


class _Scratch(ctypes.Structure):
    _fields_ = (("numbers", ctypes.c_int64), ("dtype", ctypes.c_int32), ("unused", ctypes.c_int32))


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("programs", "threads", "shared_bytes", "unused")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("driver", Driver),
        ("result", _Result * MOST_RESULTS),
        ("scratch", _Scratch * MOST_SCRATCHES),
        ("kernel", _Kernel * MOST_KERNELS),
        ("input", ctypes.c_int32 * MOST_INPUTS),
        *((name, ctypes.c_int32) for name in ("device", "inputs", "results", "scratches", "kernels", "unused")),
    )


def bound(
    module: ModuleType,
    device: torch.device,
    kernels: Sequence[Kernel],
    inputs: Sequence[int],
    outputs: Sequence[tuple[int, TensorSpec, int | None]],
    scratch: Sequence[tuple[int, torch.dtype]],
) -> Run | None:
    """What runs these kernels one after another, each on the inputs, the outputs and the scratch, in that order.

    None where there are more of something than `launch.cpp` has room for. Inputs are slots, outputs as in
    `TritonStep`, scratch has numbers of a dtype. Raises CompilerError where a function of CUDA's is missing.
    """
    counts = len(inputs), len(outputs), len(scratch), len(kernels)
    if any(n > most for n, most in zip(counts, (MOST_INPUTS, MOST_RESULTS, MOST_SCRATCHES, MOST_KERNELS), strict=True)):
        return None
    if any(len(spec.shape) > MOST_AXES for _, spec, _ in outputs):
        return None
    dtypes = tuple(dict.fromkeys([spec.dtype for _, spec, _ in outputs] + [dtype for _, dtype in scratch]))
    index = -1 if device.type == "cpu" else torch.cuda.current_device() if device.index is None else device.index
    made = _Step(driver=driver_of(index), device=index)
    made.inputs, made.results, made.scratches, made.kernels = counts
    made.input[: len(inputs)] = inputs
    for place, (slot, spec, over) in enumerate(outputs):
        lies = tuple(spec.shape), tuple(spec.strides)
        numbers = slot, -1 if over is None else over, dtypes.index(spec.dtype), len(spec.shape)
        made.result[place] = _Result(*lies, *numbers)
    for place, (count, dtype) in enumerate(scratch):
        made.scratch[place] = _Scratch(count, dtypes.index(dtype))
    for place, kernel in enumerate(kernels):
        made.kernel[place] = _Kernel(kernel.function, kernel.programs, kernel.threads, kernel.shared_bytes)
    return functools.partial(module.run, module.step(ctypes.addressof(made), dtypes))


@functools.cache
def driver_of(device: int) -> Driver:
    """CUDA's functions, and PyTorch's for its current stream. Raises CompilerError where one is missing."""
    functions = cuda_function("cuLaunchKernel"), cuda_function("cuCtxSetCurrent"), stream_function()
    return Driver(*functions, primary_context(device))
