"""Attention within windows: many short sequences that share a mask (Swin, arXiv:2103.14030)."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.kernels.arguments import expect_numbers, expect_tensors
from tilewright.kernels.attention.dispatch import strides_like
from tilewright.kernels.device import runs_triton
from tilewright.kernels.registration import define
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe


def window_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float | None = None
) -> torch.Tensor:
    """softmax(scale · q kᵀ + mask) v for each of B windows and H heads.

    Args:
        q: [B, H, Sq, D], floating point. Any strides.
        k, v: [B, H, Sk, D] and [B, H, Sk, Dv], of q's dtype and device.
        mask: [M, H or 1, Sq, Sk], floating point, added to the scores; M divides B, and window b reads mask b modulo M.
            It may need a gradient, as a learned bias of positions does.
        scale: of the products; 1 / √D unless given.

    Returns:
        [B, H, Sq, Dv] in q's dtype, its axes in memory in q's order. A row whose keys are all masked by -inf is NaN,
        as PyTorch's softmax of it.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit each other. TypeError: not floating point.

    bf16 and fp16 with up to 64 places and head sizes up to 64 run in Triton on a GPU, with sums in fp32; PyTorch's
    operators compute the others. The backward computes the scores again and has the same bits in every run.

    >>> q = k = v = torch.eye(2).reshape(1, 1, 2, 2)
    >>> window_attention(q, k, v, torch.tensor([[[[0.0, -1e9], [0.0, 0.0]]]]), scale=0.0)[0, 0]
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    expect_tensors("window_attention", q=q, k=k, v=v, mask=mask)
    expect_numbers("window_attention", scale=scale)
    tensors = (q, k, v) if mask is None else (q, k, v, mask)
    kinds = ", ".join(
        f"{name} {x.dtype} on {x.device}" for name, x in zip(("q", "k", "v", "mask"), tensors, strict=False)
    )
    if not all(x.is_floating_point() for x in tensors):
        raise TypeError(f"window_attention takes floating-point tensors, not {kinds}")
    fits = q.dim() == k.dim() == v.dim() == 4 and q.shape[:2] == k.shape[:2] == v.shape[:2]
    if not fits or q.shape[3] != k.shape[3] or k.shape[2] != v.shape[2]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"window_attention takes q [B, H, Sq, D], k [B, H, Sk, D] and v [B, H, Sk, Dv], not {shapes}")
    if len({(x.dtype, x.device) for x in (q, k, v)}) > 1 or any(x.device != q.device for x in tensors):
        raise ValueError(f"window_attention takes q, k and v of one dtype, and all tensors on one device, not {kinds}")
    if mask is not None:
        heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
        fits = mask.dim() == 4 and mask.shape[1] in (1, heads) and mask.shape[2:] == (queries, keys)
        if not fits or q.shape[0] % max(mask.shape[0], 1):
            raise ValueError(
                f"window_attention takes mask [M, H or 1, Sq, Sk], here [M, {heads} or 1, {queries}, {keys}] with M a "
                f"divisor of {q.shape[0]}, not {list(mask.shape)}"
            )
        mask = mask.expand(mask.shape[0], heads, queries, keys)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    return _window_attention(q, k, v, mask, scale)  # type: ignore[no-any-return]


def _weights(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """[B, H, Sq, Sk] in fp32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).mT) * scale
    if mask is not None:
        scores = (scores.unflatten(0, (-1, mask.shape[0])) + mask.to(wide)).flatten(0, 1)
    return scores.softmax(-1)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    out = _forward_fake(q, k, v, mask, scale)
    weights = _weights(q, k, mask, scale)
    return out.copy_(weights @ v.to(weights.dtype))


def _forward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
    return q.new_empty_strided(*strides_like(q, v.shape[3]))


def _backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float,
    want_dmask: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    weights = _weights(q, k, mask, scale)
    dout, wide_q, wide_k, wide_v = (x.to(weights.dtype) for x in (dout, q, k, v))
    dweights = dout @ wide_v.mT
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
    made = _backward_fake(dout, q, k, v, mask, scale, want_dmask)
    values = [dscores @ wide_k * scale, dscores.mT @ wide_q * scale, weights.mT @ dout]
    if mask is not None and want_dmask:
        values.append(dscores.unflatten(0, (-1, mask.shape[0])).sum(0))
    for to, value in zip(made, values, strict=False):
        to.copy_(value)
    return made


def _backward_fake(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float,
    want_dmask: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    wanted = mask is not None and want_dmask
    dmask = mask.new_empty(mask.shape) if mask is not None and wanted else q.new_empty(0)
    return *(x.new_empty_strided(*strides_like(x, x.shape[3])) for x in (q, k, v)), dmask


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    want_dmask = ctx.needs_input_grad[3]
    *found, dmask = _window_attention_backward(dout, *ctx.saved_tensors, ctx.scale, want_dmask)
    return *found, dmask if want_dmask else None, None


def _recipe(
    call: RecipeBuilder, q: Operand, k: Operand, v: Operand, mask: Operand | None, scale: float
) -> Recipe | None:
    kernels = _kernels(q, k, v)
    made: Recipe | None = kernels and kernels.forward_recipe(call, q, k, v, mask, scale)
    return made


def _backward_recipe(
    call: RecipeBuilder, dout: Operand, q: Operand, k: Operand, v: Operand, mask: Operand | None, scale: float,
    want_dmask: bool,
) -> Recipe | None:  # fmt: skip
    kernels = _kernels(q, k, v)
    made: Recipe | None = kernels and kernels.backward_recipe(call, dout, q, k, v, mask, scale, want_dmask)
    return made


def _kernels(q: Operand, k: Operand, v: Operand) -> Any:
    """The module of Triton's kernels; None if PyTorch's operators compute the call."""
    if not runs_triton(q) or 0 in (*q.shape, *k.shape, *v.shape):
        return None
    from tilewright.kernels.attention.window import triton

    return triton if triton.refuses(q.dtype, q.shape[2], k.shape[2], q.shape[3], v.shape[3]) is None else None


_window_attention_backward = define("window_attention_backward", _backward, _backward_fake, recipe=_backward_recipe)
_window_attention = define("window_attention", _forward, _forward_fake, backward=_gradients, save=_save, recipe=_recipe)
