"""The suites `attention` and `attention_decode`."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tilewright.bench.peers import inductor, library
from tilewright.bench.workloads import SHORT
from tilewright.kernels.attention import attention, dispatch, reference
from tilewright.kernels.attention.registered import attend, request_of
from tilewright.records.measurement import Direction
from tilewright.records.suite import Suite, Variant, Work, Workload

TOKENS, WIDTH = 16384, 2048
"""Batch times length, and heads times head size, of a workload that names neither batch nor heads."""
MOST_SCORES = 2**31
"""The most that attention written out is run with: it keeps several tensors of so many elements."""
PIECE = 2**28
"""Scores, and numbers of repeated keys, of a piece of the truth: 2 GiB in float64, a few times."""


class Extent(NamedTuple):
    """The sizes of a workload, by name."""

    width: int
    length: int
    causal: bool
    batch: int
    heads: int


def extent(sizes: tuple[int, ...]) -> Extent:
    """From (head size, length, causal as 0 or 1) or the same with (batch, heads).

    >>> extent((64, 4096, 1))
    Extent(width=64, length=4096, causal=True, batch=4, heads=32)
    """
    width, length, causal, *given = sizes
    batch, heads = given or (max(1, TOKENS // length), max(1, WIDTH // width))
    return Extent(width, length, bool(causal), batch, heads)


def workload(sizes: tuple[int, ...], dtype: str) -> Workload:
    """`sizes` as `extent` takes them; where batch and heads are given, a training step is raced as well."""
    size = extent(sizes)
    kind: torch.dtype = getattr(torch, dtype)

    def make(device: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
        shape = (size.batch, size.heads, size.length, size.width)
        q, k, v = (torch.randn(shape, dtype=kind, device=device, generator=generator) for _ in range(3))
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), size.causal

    scores = size.batch * size.heads * size.length * size.length
    nbytes = size.batch * size.heads * size.length * size.width * kind.itemsize
    flops = 4 * scores * size.width // (2 if size.causal else 1)
    work: dict[Direction, Work] = {
        "fwd": Work(4 * nbytes, flops, "matmul"),
        "bwd": Work(8 * nbytes, 5 * flops // 2, "matmul"),
    }
    name = f"d{size.width} S{size.length} {'causal' if size.causal else 'full'}"
    if len(sizes) > 3:
        work["fwd+bwd"] = Work(12 * nbytes, 7 * flops // 2, "matmul")
        name += f" B{size.batch} H{size.heads}"
    return Workload(name + ("" if dtype == "bfloat16" else f" {SHORT[dtype]}"), sizes, dtype, make, work)


def decode_workload(sizes: tuple[int, ...], dtype: str) -> Workload:
    """`sizes` is batch, heads of q, heads of k and v, positions of the cache, head size: one query each."""
    batch, heads, kv_heads, length, width = sizes
    kind: torch.dtype = getattr(torch, dtype)

    def make(device: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
        shapes = (batch, heads, 1, width), (batch, kv_heads, length, width), (batch, kv_heads, length, width)
        return *(torch.randn(shape, dtype=kind, device=device, generator=generator) for shape in shapes), False

    moved = 2 * batch * (kv_heads * length + heads) * width * kind.itemsize
    name = f"B{batch} H{heads}/{kv_heads} S{length} d{width} {SHORT[dtype]}"
    return Workload(name, sizes, dtype, make, {"fwd": Work(moved, 4 * batch * heads * length * width, "copy")})


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention written out. float64, the truth, is computed in pieces, since it would not fit into memory."""
    if q.dtype == torch.float64:
        return _in_pieces(q, k, v, causal)
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT) * q.shape[3] ** -0.5
    if causal:
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return torch.softmax(scores, -1) @ v


def _in_pieces(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """A few heads of k and v at a time, which backward computes again."""
    rows, keys = q.unflatten(1, (k.shape[1], -1)).flatten(0, 1), k.shape[2]
    step = max(1, PIECE // max(1, rows.shape[1] * keys * max(rows.shape[2:])))
    operands = (x.split(step) for x in (rows, *(x.flatten(0, 1)[:, None] for x in (k, v))))
    one = functools.partial(reference.attention, causal=causal)
    parts = [checkpoint(one, *some, use_reentrant=False)[0] for some in zip(*operands, strict=True)]
    return torch.cat(parts).reshape(*q.shape[:3], v.shape[3])


def sdpa(backend: SDPBackend | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """PyTorch's operator, by one of its implementations or its own choice."""
    shared = q.shape[1] != k.shape[1]
    if backend is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared)


def _flash_cute(found: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """FlashAttention's layout is [batch, positions, heads, head size]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    result = found(q, k, v, causal=causal, num_splits=0 if q.shape[1] == 1 else 1)
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out.transpose(1, 2)


def _too_large(work: Workload) -> str | None:
    size = extent(work.sizes)
    scores = size.batch * size.heads * size.length**2
    return f"{scores} scores written out, of which training keeps several copies" if scores > MOST_SCORES else None


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """The public function, with `causal` as a plain argument."""
    out: torch.Tensor = attention(q, k, v, causal=causal)
    return out


def _by(impl: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    nothing = (None, None, None, None)
    right = 0 if causal else None
    out: torch.Tensor = attend(q, k, v, *nothing, q.shape[3] ** -0.5, None, right, 0.0, 0.0, 0, 0, False, impl)[0]
    return out


def _not_hopper(work: Workload) -> str | None:
    """Why the kernels for Hopper refuse a workload on the current device, or None."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    width, length, causal, batch, heads = extent(work.sizes)
    q = torch.empty((batch, heads, length, width), dtype=getattr(torch, work.dtype), device="meta")
    right = 0 if causal else None
    request = request_of(q, q, q, None, None, None, None, width**-0.5, None, right, 0.0, 0.0, 0, 0, False)
    request = request._replace(device=torch.device("cuda", torch.cuda.current_device()))
    try:
        for backward in (False, True):
            dispatch.select(request, "hopper", backward)
    except NotImplementedError as error:
        return str(error)
    return None


def _peers(*names: str) -> tuple[Variant, ...]:
    peers = {
        "torch": Variant("torch", "torch", functools.partial(sdpa, None), "PyTorch's choice among the next"),
        "cudnn": Variant("cudnn", "library", functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION), "cuDNN"),
        "flash2": Variant("flash2", "library", functools.partial(sdpa, SDPBackend.FLASH_ATTENTION), "FlashAttention-2"),
        "flash-cute": library("flash-cute", "flash_attn.cute:flash_attn_func", _flash_cute, note="CuTe DSL"),
    }
    return tuple(peers[name] for name in names)


SUITES = {
    "attention": Suite(
        name="attention",
        summary="softmax(q kᵀ / √d) v",
        reference=formula,
        workload=workload,
        variants=(
            Variant("tilewright", "gluon", ours, "the matrix units, and exponentials"),
            Variant("tilewright-triton", "triton", functools.partial(_by, "triton"), "the matrix units"),
            Variant(
                "tilewright-hopper", "gluon", functools.partial(_by, "hopper"), "the matrix units", refuses=_not_hopper
            ),
            *_peers("torch", "cudnn", "flash2", "flash-cute"),
            Variant("eager", "torch", formula, "memory: scores written and read", refuses=_too_large),
            inductor(formula, note="memory: scores written and read", refuses=_too_large),
        ),
        sizes=tuple((d, s, c) for d in (64, 128, 256) for s in (512, 1024, 2048, 4096, 8192, 16384) for c in (0, 1)),
        dtypes=("bfloat16",),
        sources=("kernels/attention",),
        sweeps={
            "study": tuple((d, s, 0, 8, 1) for s in (256, 1024, 4096, 8192, 16384) for d in (16, 32, 64, 128, 256)),
            "memory": tuple((128, 1024 * s, 0, 1, 1) for s in (1, 2, 4, 8, 16, 32, 64, 128)),
            "small": tuple((d, s, 1, b, 16) for d in (64, 128) for s in (128, 256, 512) for b in (1, 2, 4)),
            "portable": tuple(
                (d, s, causal)
                for d, first in ((64, 0), (128, 1), (256, 0))
                for s, causal in zip((512, 1024, 4096, 16384), (first, 1 - first, first, 1 - first), strict=True)
            ),
        },
    ),
    "attention_decode": Suite(
        name="attention_decode",
        summary="one query against a long cache",
        reference=formula,
        workload=decode_workload,
        variants=(
            Variant("tilewright", "triton", ours, "memory", ("fwd",)),
            Variant("tilewright-unsplit", "triton", functools.partial(_by, "triton"), "too few programs", ("fwd",)),
            *_peers("torch", "cudnn", "flash2", "flash-cute"),
            Variant("eager", "torch", formula, "memory: keys and values repeated for every head", ("fwd",)),
        ),
        sizes=tuple(
            (b, 64, 8, s, 128) for b, s in ((8, 4096), (8, 32768), (8, 131072), (16, 65536), (64, 4096), (64, 16384))
        ),
        dtypes=("bfloat16",),
        sources=("kernels/attention",),
    ),
}
