"""Rotary position embedding of queries and keys in one launch (Su et al., RoFormer, arXiv:2104.09864)."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.kernels.arguments import expect_tensors
from tilewright.kernels.device import runs_triton
from tilewright.kernels.registration import define
from tilewright.kernels.rotary import triton
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """q[B, H, S, D] and k[B, K, S, D] with pairs of the last dimension rotated by the angles of their positions.

    A pair (a, b) becomes (a·cos - b·sin, b·cos + a·sin), with cos and sin [S, D/2]. Pairs are elements i and
    i + D/2 (GPT-NeoX, Llama), or 2i and 2i + 1 where `interleaved` (RoFormer, GPT-J). The results have the
    shapes and dtypes of q and k and, if those are dense, their layouts; q and k are copied first unless their last
    dimension has stride 1 (heads and positions may be transposed).

    q and k have one floating dtype, cos and sin another or the same; they are constants, without gradient.
    Raises ValueError where shapes, dtypes or devices do not fit, TypeError where q is not floating.

    >>> q = k = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2)
    >>> rotary(q, k, cos=torch.zeros(1, 1), sin=torch.ones(1, 1))[0].flatten()
    tensor([0., 1.])
    """
    expect_tensors("rotary", q=q, k=k, cos=cos, sin=sin)
    if not q.is_floating_point():
        raise TypeError(f"rotary takes floating-point tensors, not {q.dtype}")
    angles = (q.shape[2], q.shape[3] // 2) if q.dim() == 4 else None
    shaped = (
        q.dim() == k.dim() == 4 and q.shape[3] % 2 == 0 and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
    )
    if not shaped or tuple(cos.shape) != angles or tuple(sin.shape) != angles:
        raise ValueError(
            "rotary takes q[B, H, S, D], k[B, K, S, D] with D even, cos and sin [S, D/2], not "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if q.dtype != k.dtype or cos.dtype != sin.dtype or len({t.device for t in (q, k, cos, sin)}) > 1:
        kinds = ", ".join(f"{t.dtype} on {t.device}" for t in (q, k, cos, sin))
        raise ValueError(f"rotary takes q and k of one dtype, cos and sin of one dtype, all on one device, not {kinds}")
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("rotary gives cos and sin no gradient; detach them")
    return _rotary(q, k, cos, sin, interleaved, False)  # type: ignore[no-any-return]


def _recipe(call: RecipeBuilder, q: Operand, *arguments: Any) -> Recipe | None:
    return triton.recipe(call, q, *arguments) if runs_triton(q) else None


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, backward: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = _readable(q), _readable(k)
    return _formula(q, cos, sin, interleaved, backward), _formula(k, cos, sin, interleaved, backward)


def _readable(x: torch.Tensor) -> torch.Tensor:
    return x if triton.is_readable(x.stride()) else x.contiguous()


def _formula(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, backward: bool) -> torch.Tensor:
    out = torch.empty_like(x)
    (a, b), (to_a, to_b) = _pairs(x, interleaved), _pairs(out, interleaved)
    sin = -sin if backward else sin
    to_a.copy_(a * cos - b * sin)
    to_b.copy_(b * cos + a * sin)
    return out


def _pairs(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    half = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])


def _fake(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, backward: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.empty_like(_readable(x)) for x in (q, k))  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, _, cos, sin, ctx.interleaved, ctx.backward = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    dq, dk = _rotary(dq, dk, *ctx.saved_tensors, ctx.interleaved, not ctx.backward)
    return dq, dk, None, None, None, None


_rotary = define(
    "rotary",
    _rotate,
    _fake,
    backward=_gradients,
    save=_save,
    recipe=_recipe,
)
