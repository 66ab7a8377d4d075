"""Launches of the Hopper product with an epilogue (`cuda.cu`), built at run time."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Literal

import torch

from tilewright.hardware.architectures import limits_of
from tilewright.kernels.device import NARROW as HALVES
from tilewright.launch.builder import Operand, RecipeBuilder, tensor_map
from tilewright.launch.nvrtc import Kernel, bindings_installed, kernel
from tilewright.records.recipe import Pointer, Structure

Epilogue = Literal["none", "gelu", "gelu_tanh"]
EPILOGUES: tuple[Epilogue, ...] = ("none", "gelu", "gelu_tanh")
"""What may follow the product, in the order of the source's EPILOGUE numbers."""
SOURCE = Path(__file__).parent / "cuda.cu"
ROWS, COLUMNS, DEPTH = 128, 256, 64
"""A program's tile, and its step along K."""
STAGES = 3
"""Slots of the ring of steps."""
CLUSTER = 2
"""Programs of a cluster: their tiles have the same columns."""
VECTOR = 8
"""16-bit values in 16 bytes; rows must be multiples of it."""


EPILOGUE_WARPS = 3
THREADS = 32 * (1 + EPILOGUE_WARPS) + 256
"""Producer, epilogue, and two warpgroups that multiply."""
SHARED_BYTES = (
    STAGES * (ROWS + COLUMNS) * DEPTH * 2
    + ROWS * COLUMNS * 2
    + (STAGES + 1) * COLUMNS * 2
    + 2 * COLUMNS * 4
    + 8 * (2 * STAGES + 4)
)
"""The ring, the hand-over buffer, biases in flight and two in fp32, barriers."""


class Problem(ctypes.Structure):
    """`Problem` of the source."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("m", "n", "k")),
        *((name, ctypes.c_void_p) for name in ("y", "pre", "bias")),
    )


def refuses(x: torch.Tensor | Operand, weight: torch.Tensor | Operand) -> str | None:
    """Why this kernel does not compute x [M, K] · weight [N, K]ᵀ, by shapes, dtypes and device; or None."""
    (m, k), n = x.shape, weight.shape[0]
    if not x.is_cuda or x.dtype not in HALVES:
        return f"{x.dtype} on {x.device.type}: only 16-bit floats on a GPU"
    if not (limits := limits_of(x.device)).wgmma:
        return f"compute capability {limits.capability} lacks the matrix instructions of a warpgroup (wgmma)"
    if m == 0 or n == 0 or k == 0 or n % VECTOR or k % VECTOR:
        return f"{m}x{n}x{k}: rows must be multiples of 16 bytes"
    if max(m, k) >= 2**31 - ROWS * CLUSTER or n >= 2**28 or m * n >= 2**32 * VECTOR:
        return f"{m}x{n}x{k}: more than 32-bit tile coordinates and counts of vectors hold"
    if not bindings_installed():
        return "the package cuda-bindings is not installed"
    return None


def product(
    call: RecipeBuilder,
    x: Operand,
    weight: Operand,
    bias: Operand | None,
    epilogue: Epilogue = "none",
    *,
    keep: bool = False,
) -> tuple[Operand, Operand]:
    """epilogue(x · weightᵀ + bias) [M, N], and the value before the activation where `keep` (else empty).

    x [M, K] and weight [N, K] in bf16 or fp16 for which `refuses` is None; bias [N].
    Operands that are not contiguous or not aligned to 16 bytes are copied first.
    """
    x, weight = _aligned(call, x), _aligned(call, weight)
    bias = None if bias is None else _aligned(call, bias)
    (m, k), n = x.shape, weight.size(0)
    y = call.empty((m, n), x.dtype)
    pre = call.empty((m, n) if keep else (0,), x.dtype)
    problem = Problem(m, n, k)
    placed = {Problem.y: y, Problem.pre: pre if keep else None, Problem.bias: bias}
    patches = tuple((field.offset, Pointer(x.index, x.offset)) for field, x in placed.items() if x is not None)
    built = _built(epilogue, bias is not None, keep, x.dtype, x.device.index)
    grid = (programs(m, n, limits_of(x.device).multiprocessors),)
    maps = tensor_map(x, (ROWS, DEPTH)), tensor_map(weight, (COLUMNS // CLUSTER, DEPTH))
    call.launch(built, grid, *maps, Structure(bytes(problem), patches))
    return y, pre


def _aligned(call: RecipeBuilder, x: Operand) -> Operand:
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else call.copy(x)


def definitions(epilogue: Epilogue, bias: bool, keep: bool, dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
    """The macros that the source is compiled with."""
    settings = {
        "STAGES": STAGES,
        "EPILOGUE": EPILOGUES.index(epilogue),
        "BIAS": int(bias),
        "KEEP_PRE": int(keep),
        "HALF": int(dtype == torch.float16),
    }
    return tuple(settings.items())


@functools.cache
def _built(epilogue: Epilogue, bias: bool, keep: bool, dtype: torch.dtype, device: int) -> Kernel:
    return kernel(
        SOURCE,
        "linear_epilogue",
        "",
        device=device,
        threads=THREADS,
        shared_bytes=SHARED_BYTES,
        cluster=CLUSTER,
        definitions=definitions(epilogue, bias, keep, dtype),
    )


def programs(m: int, n: int, multiprocessors: int) -> int:
    """Programs of a launch: a cluster for each tile of the cluster's size, at most one a pair of multiprocessors."""
    tiles = -(-m // (ROWS * CLUSTER)) * -(-n // COLUMNS)
    return CLUSTER * min(tiles, multiprocessors // CLUSTER)
