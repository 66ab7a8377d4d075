"""The backward of PyTorch's fused attention for CPUs, as exact as the backward of attention written out.

PyTorch's kernel computes the weights again as exp(s - lse) and takes the row sums of dO ∘ O for those of
P ∘ dP. Both depend on rounded values of forward: an lse of 30 is off by 2e-6 in fp32, and O in bf16 by 2⁻⁹, so that
gradients which nearly cancel (a peaked row; the sum over all keys) have several times the error that eager has.
`attention_backward.h` computes both from whole rows instead: the same five matrix products, done by the BLAS that
PyTorch brings, without the online softmax that whole rows do not need. Operands of 16 bits are computed with in fp32.
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
from tilewright.records.recipe import Layout
from tilewright.runtime.compiler import load
from tilewright.runtime.executable import CPU, empty, threads

OPERATOR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_ROWS, LEAST_ROWS = 128, 16
SCRATCH_BYTES = 4 * 1024 * 1024
"""What a thread's two blocks of rows, of P and of dP, may take, as long as they have `LEAST_ROWS`."""
PAD = 16
"""Elements between rows: those that begin a power of two apart share few lines of the cache (10 % slower)."""
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
    """The function that replaces `OPERATOR`, with its arguments and results; that operator itself if PyTorch's library
    does not export its BLAS. Raises CompilerError.
    """
    gemm = _gemm()
    if gemm is None:
        return OPERATOR
    source = (files("tilewright.runtime") / "attention_backward.h").read_text()
    return functools.partial(_backward, load(translation_unit([source])), gemm)


@functools.cache
def _gemm() -> int | None:
    """The address of `sgemm_` in the BLAS that PyTorch was linked with; None where its library hides it."""
    libraries = Path(torch.__file__).parent / "lib"
    try:
        function = ctypes.CDLL(str(libraries / "libtorch_cpu.so")).sgemm_
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def _backward(
    library: ctypes.CDLL, gemm: int, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, dropout_p: float, is_causal: bool, *, attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Sequence[torch.Tensor]:  # fmt: skip
    """dq, dk, dv of grad, q [B, H, Nq, d], k and v [B, H / n, Nk, d]; the mask broadcasts to the scores.

    Each n heads of queries that follow one another share a head of keys (n is 1 unless attention is grouped).
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
    """An operand whose rows are dense and do not overlap, as a matrix product reads them."""
    fits = x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1]
    # `contiguous` would keep any stride along an axis of one row.
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _like_eager(x: torch.Tensor) -> torch.Tensor:
    """fp32 in pooled storage for a gradient [B, H, N, d], laid out as [B, N, H, d] like PyTorch's."""
    batch, heads, rows, depth = x.shape
    strides = (rows * heads * depth, depth, heads * depth, 1)
    return empty(Layout((batch, heads, rows, depth), strides, torch.float32, CPU))


def _scratch(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """[threads, a block of P and one of dP] in pooled storage, the rows of a block, and their stride."""
    keys = k.shape[2]
    rows = min(max(SCRATCH_BYTES // (2 * 4 * keys), LEAST_ROWS), MOST_ROWS, q.shape[2])
    row = keys + PAD
    shape = (threads(), 2 * rows * row)
    return empty(Layout(shape, (shape[1], 1), torch.float32, CPU)), rows, row
