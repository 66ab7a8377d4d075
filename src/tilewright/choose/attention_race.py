"""Races attention kernels on a GPU: tilewright's against PyTorch's choice and its other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from tilewright.graph.calls import shape_of, strides_of
from tilewright.graph.canonical import tensor_of
from tilewright.kernels.attention.reference import distances, visible_keys
from tilewright.kernels.attention.request import Request
from tilewright.kernels.offer import THEIRS
from tilewright.launch.race import Alternatives, Race, random_operand
from tilewright.passes.attention.fused import FusedAttention
from tilewright.passes.attention.library import CUDNN, EFFICIENT, FLASH, PEERS, Peer, Saved, options_of, perform_now
from tilewright.records.errors import warn_once

MADE_FROM = ("kernels/attention", "kernels/product")


class Bias(NamedTuple):
    """What the kernel of the graph adds to the scores, as it lies there: its shape broadcasts to [B, H, Sq, Sk]."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Raced(NamedTuple):
    """What is raced: the kernel of the graph for `request`, called in this form, against others, tilewright's too."""

    request: Request
    peer: Peer
    causal: bool
    bias: Bias | None
    training: bool
    others: tuple[Peer, ...]

    @property
    def peers(self) -> dict[str, Peer]:
        """The kernels by their names in the race."""
        return {THEIRS: self.peer, **{peer.name: peer for peer in self.others if peer is not self.peer}}

    @property
    def work(self) -> tuple[str, ...]:
        """What the outcome is of."""
        options = f"causal={self.causal} bias={self.bias} training={self.training}"
        return str(self.request._replace(device=torch.device("meta"))), options, *self.peers, self.peer.name


def attention_races(call: FusedAttention, others: Sequence[Peer]) -> tuple[Race, ...]:
    """A race of the forward, in training one of the backward too; none on a CPU, or where nothing could win."""
    if call.request.device.type != "cuda" or not {*others} - {call.peer}:
        return ()
    mask, causal = call.of_library
    lies = None if mask is None else tensor_of(mask)
    bias = None if lies is None else Bias(tuple(shape_of(lies)), tuple(strides_of(lies)), lies.dtype)
    return races_of(Raced(call.request, call.peer, causal, bias, bool(call.backwards), tuple(others)))


def races_of(raced: Raced) -> tuple[Race, ...]:
    """The race of the forward and, in training, that of the backward."""
    directions = ("forward", _forwards), ("backward", _backwards)
    return tuple(
        Race(("attention", name, *raced.work), raced.request.device, MADE_FROM, partial(alternatives, raced))
        for name, alternatives in directions[: 1 + raced.training]
    )


class _Kernels(NamedTuple):
    """One alternative on given operands: its forward, and its backward of a gradient and what a forward saved."""

    attend: Callable[[], Saved]
    differentiate: Callable[[torch.Tensor, Saved], Sequence[torch.Tensor]]


def _forwards(raced: Raced) -> Alternatives:
    kernels = _runnable(raced)
    strides = kernels[THEIRS].attend().out.stride()
    return {name: partial(_laid, one.attend, strides) for name, one in kernels.items()}


def _laid(attend: Callable[[], Saved], strides: Sequence[int]) -> torch.Tensor:
    """The result of a forward, copied if a program would have to copy it."""
    out: torch.Tensor = attend().out
    if out.stride() == strides:
        return out
    return torch.empty_strided(out.shape, strides, dtype=out.dtype, device=out.device).copy_(out)


def _backwards(raced: Raced) -> Alternatives:
    kernels = _runnable(raced)
    theirs = kernels[THEIRS].attend()
    generator = torch.Generator(raced.request.device).manual_seed(1)
    grad = random_operand(theirs.out.shape, theirs.out.stride(), theirs.out.dtype, generator)
    # Each of what it would get: that of its own forward where log-sum-exps differ.
    saved = {name: theirs if raced.peer.shares_lse or name == THEIRS else one.attend() for name, one in kernels.items()}
    return {name: partial(one.differentiate, grad, saved[name]) for name, one in kernels.items()}


def _runnable(raced: Raced) -> dict[str, _Kernels]:
    """The alternatives by name; a kernel that refuses the operands is left out."""
    r = raced.request
    q, k, v = _operands(r)
    bias = None if raced.bias is None else _filled(raced.bias, r)
    own: dict[str, Any] = {"left": r.left, "right": r.right, "softcap": r.softcap, "deterministic": r.deterministic}
    own |= {"mask": _mask(r), "zeros": torch.zeros(r.batch * r.kv_heads, dtype=torch.int32, device=r.device)}
    form: dict[str, Any] = {"training": raced.training, "causal": raced.causal, "scale": r.scale}
    found = {}
    for name, peer in raced.peers.items():
        keys, values = (x.repeat_interleave(r.group, 1) if peer is EFFICIENT else x for x in (k, v))
        options = options_of(q, keys, values, bias, (r.queries, r.keys), **form, **own)
        calls = partial(peer.attend, perform_now, options), partial(peer.differentiate, perform_now, options)
        found[name] = _Kernels(*calls)
    takes = partial(_takes, raced, (q, k, v, bias))
    others = [name for name in found if name != THEIRS and takes(raced.peers[name])]
    return {name: found[name] for name in (THEIRS, *(one for one in others if _runs(one, found[one], raced)))}


TAKES = {CUDNN: torch.backends.cuda.can_use_cudnn_attention, FLASH: torch.backends.cuda.can_use_flash_attention}
"""PyTorch's own tests. What they refuse may crash: cuDNN's backward of one key does (PyTorch 2.11)."""


def _takes(raced: Raced, operands: Sequence[torch.Tensor | None], peer: Peer) -> bool:
    """Whether PyTorch would run this kernel of its own; True of tilewright's."""
    if peer not in TAKES:
        return True
    *given, bias = operands
    q, k, v = (x.detach().requires_grad_(raced.training) for x in given if x is not None)
    grouped = raced.request.group > 1
    return q.is_cuda and TAKES[peer](torch.backends.cuda.SDPAParams(q, k, v, bias, 0.0, raced.causal, grouped))


def _runs(name: str, one: _Kernels, raced: Raced) -> bool:
    """Whether a library takes the operands; a kernel of tilewright's that does not is reported."""
    try:
        saved = one.attend()
        if raced.training:
            one.differentiate(saved.out, saved)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if raced.peers[name] not in PEERS:
            warn_once(f"{name} was not raced: {error}")
        return False
    return True


def _operands(request: Request) -> list[torch.Tensor]:
    """Random q, k and v with the strides of the request."""
    r = request
    shapes = (
        ((r.batch, r.heads, r.queries, r.head_size), r.q_strides),
        ((r.batch, r.kv_heads, r.keys, r.head_size), r.k_strides),
        ((r.batch, r.kv_heads, r.keys, r.value_size), r.v_strides),
    )
    own = torch.Generator(r.device).manual_seed(0)
    return [random_operand(*lies, r.dtype, own) for lies in shapes]


def _mask(request: Request) -> torch.Tensor | None:
    """The mask of the request's kind beside its band, of the shape of the scores; all heads share it, as is usual."""
    if request.mask == "none":
        return None
    mask = _seen(request)
    if request.mask == "additive":
        mask = torch.zeros_like(mask, dtype=request.dtype).masked_fill_(~mask, -torch.inf)
    return mask.expand(request.batch, request.heads, -1, -1)


def _seen(request: Request) -> torch.Tensor:
    """bool [queries, keys]: all keys, of a masked request all but every eighth and that at the query's own place."""
    away = distances(request.queries, request.keys, request.device)
    hidden = torch.arange(request.keys, device=request.device) % 8 == 0
    return torch.ones_like(away, dtype=torch.bool) if request.mask == "none" else ~hidden | (away == 0)


def _filled(bias: Bias, request: Request) -> torch.Tensor:
    """The band and the mask of the request, as the kernel of the graph reads them."""
    away = distances(request.queries, request.keys, request.device)
    seen = _seen(request) & visible_keys(away, False, (request.left, request.right))
    values = (
        seen if bias.dtype == torch.bool else torch.zeros_like(away, dtype=bias.dtype).masked_fill_(~seen, -torch.inf)
    )
    whole = torch.empty_strided(bias.shape, bias.strides, dtype=bias.dtype, device=request.device)
    # Along an axis of stride 0 one entry is all of them.
    once = whole[tuple(slice(None if stride else 1) for stride in bias.strides)]
    once.copy_(values[tuple(slice(size) for size in once.shape[-2:])])
    return whole
