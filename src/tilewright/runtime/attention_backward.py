"""The backward of PyTorch's fused attention for CPUs, as accurate as the backward of unfused attention.

PyTorch's kernel recomputes the weights as exp(s - lse), and uses the row sums of dO ∘ O for those of P ∘ dP. Both
depend on rounded results of forward: an lse of 30 is off by 2e-6 in fp32, O in bf16 by 2⁻⁹. Gradients that nearly
cancel (in a peaked row; in the sum over all keys) then have several times eager's error. `attention_backward.h`
computes both from whole rows: the same five matrix products, by PyTorch's BLAS, without an online softmax. It computes
16-bit operands in fp32.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from tilewright.emit.cpp import translation_unit
from tilewright.launch.driver import address
from tilewright.records.errors import CompilerError
from tilewright.records.recipe import Layout, dense_strides
from tilewright.runtime.compiler import load
from tilewright.runtime.executable import CPU, empty, threads

OPERATOR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_ROWS, LEAST_ROWS = 128, 16
SCRATCH_BYTES = 4 * 1024 * 1024
"""The most bytes of a thread's two blocks of rows (P and dP), unless they have fewer than `LEAST_ROWS` rows then."""
PAD = 16
"""Elements between rows: rows that are a power of two apart map to few cache sets (10 % slower)."""
Strides = ctypes.c_int64 * 3


class AttentionArguments(ctypes.Structure):
    """`tw_attention` of attention_backward.h; strides in elements."""

    _fields_ = (
        ("tensors", ctypes.c_void_p * 7),
        ("mask", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("gemm", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("heads", "heads_per_batch", "sharing", "queries", "keys", "depth")),
        *((name, ctypes.c_int64) for name in ("block", "row", "causal", "scratch_stride")),
        ("strides", Strides * 7),
        ("mask_strides", ctypes.c_int64 * 4),
        ("scale", ctypes.c_float),
    )


def attention_backward() -> Callable[..., Any]:
    """The function that replaces `OPERATOR`, with the same arguments and results; `OPERATOR` itself if PyTorch does not
    export its BLAS. Raises CompilerError.
    """
    gemm = _gemm()
    if gemm is None:
        return OPERATOR
    source = (files("tilewright.runtime") / "attention_backward.h").read_text()
    return functools.partial(_backward, load(translation_unit([source])), gemm)


@functools.cache
def _gemm() -> int | None:
    """The address of `sgemm_` in PyTorch's BLAS; None if PyTorch's library does not export it."""
    try:
        return address(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so"), "sgemm_")
    except CompilerError:
        return None


def _backward(
    library: ctypes.CDLL, gemm: int, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, dropout_p: float, is_causal: bool, *, attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Sequence[torch.Tensor]:  # fmt: skip
    """dq, dk, dv of grad and q [B, H, Nq, d], k and v [B, H / n, Nk, d]; the mask broadcasts to the scores.

    n consecutive heads of queries share a head of keys (n is 1 unless attention is grouped).
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.dtype not in DTYPES or 0 in (*q.shape, *k.shape):
        eager: Sequence[torch.Tensor] = OPERATOR(
            grad, q, k, v, out, lse, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )
        return eager
    operands = [_by_rows(x.float()) for x in (q, k, v, grad)]
    results = [_like_eager(x) for x in (q, k, v)]
    mask = None if attn_mask is None else attn_mask.float().expand(*q.shape[:3], k.shape[2])
    scratch, block, row = _scratch(q, k)
    arguments = AttentionArguments(
        tensors=(ctypes.c_void_p * 7)(*(x.data_ptr() for x in (*operands, *results))),
        mask=None if mask is None else mask.data_ptr(),
        scratch=scratch.data_ptr(),
        gemm=gemm,
        heads=k.shape[0] * k.shape[1],
        heads_per_batch=k.shape[1],
        sharing=q.shape[1] // k.shape[1],
        queries=q.shape[2],
        keys=k.shape[2],
        depth=k.shape[3],
        block=block,
        row=row,
        causal=is_causal,
        scratch_stride=scratch.stride(0),
        strides=(Strides * 7)(*(Strides(*x.stride()[:3]) for x in (*operands, *results))),
        mask_strides=(ctypes.c_int64 * 4)(*(() if mask is None else mask.stride())),
        scale=scale,
    )
    library.tw_attention_backward(ctypes.byref(arguments), threads())
    return [x.to(q.dtype) for x in results]


def _by_rows(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy of it, with contiguous rows that do not overlap, as a matrix product reads them."""
    fits = x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1]
    # `contiguous` would keep any stride along an axis of size 1.
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _like_eager(x: torch.Tensor) -> torch.Tensor:
    """An fp32 tensor in pooled storage for a gradient [B, H, N, d], in memory [B, N, H, d] like PyTorch's."""
    shape = tuple(x.shape)
    return empty(Layout(shape, dense_strides(shape, (0, 2, 1, 3)), torch.float32, CPU))


def _scratch(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Pooled storage [threads, a block of P and one of dP], the rows of a block, and the row stride."""
    keys = k.shape[2]
    rows = min(max(SCRATCH_BYTES // (2 * 4 * keys), LEAST_ROWS), MOST_ROWS, q.shape[2])
    row = keys + PAD
    shape = (threads(), 2 * rows * row)
    return empty(Layout(shape, (shape[1], 1), torch.float32, CPU)), rows, row
