"""Races attention kernels on a GPU: tilewright's against PyTorch's choice and its other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from tilewright.kernels.attention.reference import distances, visible_keys
from tilewright.kernels.attention.request import Request
from tilewright.kernels.offer import OURS, THEIRS
from tilewright.launch.race import Alternatives, Race, random_operand
from tilewright.passes.attention import fused
from tilewright.passes.attention.fused import FusedAttention
from tilewright.passes.attention.library import EFFICIENT, Peer, Saved, options_of, perform_now

MADE_FROM = ("kernels/attention",)
ALIGNED = 16
"""Elements whose multiples the rows of a bias begin at in PyTorch's kernels."""


class Raced(NamedTuple):
    """What is raced: tilewright's kernels for `request` against the graph's, called in this form, and libraries."""

    request: Request
    peer: Peer
    causal: bool
    biased: bool
    training: bool
    libraries: tuple[Peer, ...]
    has_ours: bool
    splits: bool = False
    """Whether tilewright's kernel is that for few queries that see a whole cache."""

    @property
    def peers(self) -> dict[str, Peer]:
        """PyTorch's kernels by their names in the race."""
        return {THEIRS: self.peer, **{peer.name: peer for peer in self.libraries if peer is not self.peer}}

    @property
    def work(self) -> tuple[str, ...]:
        """What the outcome is of."""
        options = f"causal={self.causal} biased={self.biased} training={self.training}"
        options += f" ours={self.has_ours} splits={self.splits}"
        names = (peer.name for peer in self.peers.values())
        return str(self.request._replace(device=torch.device("meta"))), options, *names


def attention_races(call: FusedAttention, libraries: Sequence[Peer], has_ours: bool) -> tuple[Race, ...]:
    """A race of the forward, in training one of the backward too; none on a CPU, or where nothing could win."""
    request, training = call.request, bool(call.backwards)
    if request.device.type != "cuda" or not (has_ours or {*libraries} - {call.peer}):
        return ()
    given = call.library_options()
    form = given["is_causal"], given["attn_bias"] is not None
    return races_of(Raced(request, call.peer, *form, training, tuple(libraries), has_ours, call.splits_cache))


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
    """The alternatives by name; a library that refuses the operands is left out."""
    import tilewright.kernels.attention.registered  # noqa: F401, defines the operators

    r = raced.request
    q, k, v = _operands(r)
    bias = _bias(r) if raced.biased else None
    found = {}
    for name, peer in raced.peers.items():
        keys, values = (x.repeat_interleave(r.group, 1) if peer is EFFICIENT else x for x in (k, v))
        lengths, training = (r.queries, r.keys), raced.training
        options = options_of(q, keys, values, bias, lengths, training=training, causal=raced.causal, scale=r.scale)
        calls = partial(peer.attend, perform_now, options), partial(peer.differentiate, perform_now, options)
        found[name] = _Kernels(*calls)
    found = {name: one for name, one in found.items() if name == THEIRS or _runs(one, raced.training)}
    if raced.has_ours:
        band, after = (r.left, r.right), (r.softcap, 0.0, 0, 0, r.deterministic, "auto")
        given = perform_now, (q, k, v), (_mask(r), None, None, None, r.scale, *band, *after)
        found[OURS] = _Kernels(partial(fused.attend, *given), partial(fused.differentiate, *given))
        if raced.splits:
            zeros = torch.zeros(r.batch * r.kv_heads, dtype=torch.int32, device=r.device)
            found[OURS] = found[OURS]._replace(attend=partial(fused.attend_cache, *given[:2], zeros, r.scale))
    return found


def _runs(one: _Kernels, training: bool) -> bool:
    """Whether a library takes the operands."""
    try:
        saved = one.attend()
        if training:
            one.differentiate(saved.out, saved)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
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


def _bias(request: Request) -> torch.Tensor:
    """What PyTorch's kernels add to the scores for the band and the mask of the request."""
    away = distances(request.queries, request.keys, request.device)
    seen = _seen(request) & visible_keys(away, False, (request.left, request.right))
    padded = -(-request.keys // ALIGNED) * ALIGNED
    bias = torch.zeros(request.queries, padded, dtype=request.dtype, device=request.device)[:, : request.keys]
    return bias.masked_fill_(~seen, -torch.inf).expand(request.batch, request.heads, -1, -1)
