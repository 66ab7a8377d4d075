"""GELU by hand, twice: in Triton (here) and in CUDA C++ (`gelu.cu`), which is built at run time.

    tilewright bench gelu
    tilewright kernel gelu 4096x4096 --impl tilewright-cuda --on h200

Both are at the limit of memory, as the kernel that tilewright generates is: the language does not matter.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import rounded
from tilewright.kernels.activation.formulas import activate_and_slope
from tilewright.kernels.device import current
from tilewright.launch import nvrtc

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 256
BLOCK = 1024
"""Elements of a program in Triton."""
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "float"}


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x·Φ(x) for x of any shape on a CUDA device, fp32, bf16 or fp16; other layouts are made contiguous.

    Raises CompilerError without the package cuda-bindings, ValueError for another device or dtype.
    """
    if not x.is_cuda or x.dtype not in ELEMENTS:
        raise ValueError(f"this GELU takes fp32, bf16 or fp16 on a CUDA device, not {x.dtype} on {x.device}")
    result: torch.Tensor = _Gelu.apply(x, _launch)
    return result


def in_triton(x: torch.Tensor) -> torch.Tensor:
    """The same in Triton, also in its interpreter."""
    result: torch.Tensor = _Gelu.apply(x, _launch_triton)
    return result


@triton.jit
def _gelu(x, dy, out, count, BACKWARD: tl.constexpr, PRECISE: tl.constexpr, BLOCK: tl.constexpr):
    """x·Φ(x), or dy times its slope, of BLOCK neighbours."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    result, slope = activate_and_slope(tl.load(x + at, inside).to(tl.float32), "gelu", PRECISE)
    if BACKWARD:
        result = tl.load(dy + at, inside).to(tl.float32) * slope
    tl.store(out + at, rounded(result, out.dtype.element_ty), inside)


def _launch_triton(x: torch.Tensor, dy: torch.Tensor | None) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        given = (x, None if dy is None else dy.contiguous(), out, x.numel())
        with current(x):
            _gelu[(triton.cdiv(x.numel(), BLOCK),)](*given, dy is not None, x.dtype == torch.float32, BLOCK)
    return out


def definitions(dtype: torch.dtype, aligned: bool, backward: bool) -> nvrtc.Definitions:
    """The macros that the source is compiled with."""
    names = ("ELEMENT", "VECTOR_ALIGNED", "BACKWARD", "THREADS")
    return tuple(zip(names, (ELEMENTS[dtype], int(aligned), int(backward), THREADS), strict=True))


def _launch(x: torch.Tensor, dy: torch.Tensor | None) -> torch.Tensor:
    x = x.contiguous()
    dy = None if dy is None else dy.contiguous()
    out = torch.empty_like(x)
    addresses = x.data_ptr(), 0 if dy is None else dy.data_ptr(), out.data_ptr()
    aligned = not any(address % 16 for address in addresses)
    lanes = 16 // x.element_size() if aligned else 1
    kernel = nvrtc.kernel(
        SOURCE,
        "gelu",
        "PPPq",
        device=x.device.index,
        threads=THREADS,
        definitions=definitions(x.dtype, aligned, dy is not None),
    )
    # The elements that fill no vector are one a thread, and fewer than a block has threads.
    threads = max(x.numel() // lanes, x.numel() % lanes)
    with current(x):
        kernel((-(-threads // THREADS),), *addresses, x.numel())
    return out


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, launch: Callable[..., torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.launch = launch
        return launch(x, None)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.launch(x, dy), None
