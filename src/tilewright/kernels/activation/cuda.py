"""GELU in CUDA C++, built at run time: the same operator as in Triton, by another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tilewright.kernels import nvrtc
from tilewright.kernels.device import DTYPES, current
from tilewright.kernels.no_double_backward import no_double_backward
from tilewright.kernels.registration import define
from tilewright.records.suite import Workload

SOURCE = Path(__file__).parent / "cuda.cu"
THREADS = 256
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "float"}


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x·Φ(x) for x of any shape on a CUDA device, fp32, bf16 or fp16; other layouts are made contiguous.

    Raises CompilerError without the package cuda-bindings, ValueError for another device or dtype.
    """
    if not x.is_cuda or x.dtype not in DTYPES:
        raise ValueError(f"this GELU takes fp32, bf16 or fp16 on a CUDA device, not {x.dtype} on {x.device}")
    return _gelu(x)  # type: ignore[no-any-return]


def refuses(workload: Workload) -> str | None:
    """Why a workload cannot be computed this way, or None."""
    if torch.cuda.is_available() and nvrtc.available(torch.cuda.current_device()):
        return None if getattr(torch, workload.dtype) in ELEMENTS else f"not in {workload.dtype}"
    return "needs the package cuda-bindings and a GPU whose blocks form clusters"


def definitions(dtype: torch.dtype, aligned: bool, backward: bool) -> nvrtc.Definitions:
    """What the source is compiled with."""
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
    # One thread more for each element that fills no vector: fewer than a block has.
    threads = max(x.numel() // lanes, x.numel() % lanes)
    with current(x):
        kernel((-(-threads // THREADS),), *addresses, x.numel())
    return out


def _save(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_gelu_backward = define(
    "gelu_cuda_backward(Tensor dy, Tensor x) -> Tensor",
    lambda dy, x: _launch(x, dy),
    lambda dy, x: _like(x),
    backward=no_double_backward("gelu_cuda_backward"),
    repeats=True,
)
_gelu = define(
    "gelu_cuda(Tensor x) -> Tensor",
    lambda x: _launch(x, None),
    _like,
    backward=lambda ctx, dy: _gelu_backward(dy, *ctx.saved_tensors),
    save=_save,
    repeats=True,
)
