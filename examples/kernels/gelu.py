"""GELU in CUDA C++ (`gelu.cu`), built at run time: the arithmetic of tilewright's Triton kernel in another language.

    tilewright bench gelu
    tilewright kernel gelu 4096x4096 --impl tilewright-cuda --on h200

Both are at the limit of memory, so the language does not matter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tilewright.kernels.device import current
from tilewright.launch import nvrtc

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 256
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "float"}


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x·Φ(x) for x of any shape on a CUDA device, fp32, bf16 or fp16; other layouts are made contiguous.

    Raises CompilerError without the package cuda-bindings, ValueError for another device or dtype.
    """
    if not x.is_cuda or x.dtype not in ELEMENTS:
        raise ValueError(f"this GELU takes fp32, bf16 or fp16 on a CUDA device, not {x.dtype} on {x.device}")
    result: torch.Tensor = _Gelu.apply(x)  # type: ignore[no-untyped-call]
    return result


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
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return _launch(x, None)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return _launch(x, dy)
