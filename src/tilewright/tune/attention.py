"""Whose attention kernels run: tilewright's raced against PyTorch's on a GPU, and the outcome kept.

`raced` follows what is kept, in any process; `race` fills it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tilewright.graph.capture import in_real_tensors
from tilewright.measure.timing.benchmark import benchmark
from tilewright.records import cache
from tilewright.tune.kept import keep, kept
from tilewright.tune.trial import Trial

if TYPE_CHECKING:
    from tilewright.kernels.attention.request import Request

RACE_SECONDS = 0.4


def raced(request: Request, training: bool) -> tuple[float, float] | None:
    """Microseconds of tilewright's kernels and of PyTorch's, as `choose_kernels` takes them."""
    trial = kept(_key(request, training))
    return None if trial is None else (trial.fused_us, trial.separate_us)


def race(request: Request, training: bool) -> tuple[float, float] | None:
    """`raced`, after a race on random operands where there was none. None on a CPU, whose interpreter is no race."""
    if request.device.type != "cuda":
        return None
    if kept(_key(request, training)) is None:
        with in_real_tensors(), torch.cuda.device(request.device):
            keep(_key(request, training), _race(request, training))
    return raced(request, training)


def _key(request: Request, training: bool) -> str:
    import triton

    import tilewright

    device = torch.cuda.get_device_name(request.device) if request.device.type == "cuda" else "cpu"
    versions = torch.__version__, triton.__version__, tilewright.__version__
    asked = request._replace(device=torch.device("meta")), training
    return cache.key_of("attention trial", str(asked), device, *versions)


def _race(request: Request, training: bool) -> Trial:
    """Device time of both, forward or forward and backward: each a CUDA graph, so that no host is measured."""
    from tilewright.kernels.attention import registered
    from tilewright.kernels.attention.dispatch import strides_like

    q, k, v = _operands(request, training)
    mask = _mask(request)
    shared = request.heads != request.kv_heads
    causal = request.right is not None
    options = (None, None, None, request.scale, None, request.right, 0.0, 0.0, 0, 0, request.deterministic, "auto")
    expanded = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    grad = torch.empty_strided(*strides_like(q, request.value_size), dtype=q.dtype, device=q.device).normal_()

    def ours() -> None:
        with torch.no_grad():
            results = registered.forward(q, k, v, expanded, *options)
            if training:
                registered.backward(grad, None, q, k, v, *results, expanded, *options)

    def pytorch() -> None:
        with torch.set_grad_enabled(training):
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, scale=request.scale, enable_gqa=shared
            )
            if training:
                torch.autograd.grad(out, (q, k, v), grad)

    replays = {"tilewright": _captured(ours), "pytorch": _captured(pytorch)}
    times = benchmark(replays, device=str(request.device), max_seconds=RACE_SECONDS, min_repeats=5)
    return Trial(times["tilewright"].median_us, times["pytorch"].median_us)


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """`step` as a CUDA graph, after a run that compiles what it needs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], None] = graph.replay
    return replay


def _operands(request: Request, training: bool) -> list[torch.Tensor]:
    """Random q, k and v that lie in memory as the request's."""
    r = request
    shapes = (
        ((r.batch, r.heads, r.queries, r.head_size), r.q_strides),
        ((r.batch, r.kv_heads, r.keys, r.head_size), r.k_strides),
        ((r.batch, r.kv_heads, r.keys, r.value_size), r.v_strides),
    )
    drawn = (torch.empty_strided(*lies, dtype=r.dtype, device=r.device).normal_() for lies in shapes)
    return [x.requires_grad_(training) for x in drawn]


def _mask(request: Request) -> torch.Tensor | None:
    """A mask of the request's kind that hides every eighth key; one for all heads, as most are."""
    if request.mask == "none":
        return None
    seen = (torch.arange(request.keys, device=request.device) % 8 > 0).expand(request.queries, -1).contiguous()
    if request.mask == "boolean":
        return seen
    return torch.zeros_like(seen, dtype=request.dtype).masked_fill_(~seen, -torch.inf)
