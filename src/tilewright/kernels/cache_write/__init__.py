"""Writes keys and values of new tokens into a static cache, with their rotary embedding: `tilewright::write_cache_`.

keys[b, h, place[t]] = turned(k)[b, h, t];   values[b, h, place[t]] = v[b, h, t];   the result is turned(q)
turned(x) = x · cos + (-x[half:], x[:half]) · sin
"""

from __future__ import annotations

import torch

from tilewright.kernels.device import runs_triton
from tilewright.kernels.registration import define
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    cos, sin = (y if y.shape[-1] == x.shape[-1] else torch.cat((y, y), -1) for y in (cos, sin))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def _forward(
    keys: torch.Tensor, values: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: torch.Tensor,
    q: torch.Tensor | None, cos: torch.Tensor | None, sin: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    turned = k.new_empty(0)
    if cos is not None and sin is not None:
        k, turned = _rotated(k, cos, sin), turned if q is None else _rotated(q, cos, sin).contiguous()
    keys[:, :, place], values[:, :, place] = k, v
    return turned


def _recipe(
    call: RecipeBuilder, keys: Operand, values: Operand, k: Operand, v: Operand, place: Operand, q: Operand | None,
    cos: Operand | None, sin: Operand | None,
) -> Recipe | None:  # fmt: skip
    given = [x for x in (keys, values, k, v, q, cos, sin) if x is not None]
    if not runs_triton(keys) or any(0 in x.shape or x.strides[-1] != 1 for x in given) or place.strides != (1,):
        return None
    from tilewright.kernels.cache_write.triton import write_cache

    batch, kv_heads, tokens, width = k.shape
    turned = call.empty((0,) if q is None else q.shape, k.dtype)
    heads = 0 if q is None else q.shape[1]
    none = (0, 0, 0)
    of_q = (*q.strides[:3], *turned.strides[:3]) if q is not None else (*none, *none)
    angles = [(x.strides[0], x.strides[2]) if x is not None else (0, 0) for x in (cos, sin)]
    call.launch(
        write_cache, (batch * tokens, heads + 2 * kv_heads), keys, values, k, v, place, q,
        None if q is None else turned, cos, sin, tokens, heads, kv_heads, keys.shape[2], *keys.strides[:3],
        *values.strides[:3], *k.strides[:3], *v.strides[:3], *of_q, *angles[0], *angles[1], half=width // 2,
        more=0 if cos is None or cos.shape[3] < width else width // 2, ROTARY=cos is not None,
        WIDTH=1 << (width // 2 - 1).bit_length(), num_warps=1,
    )  # fmt: skip
    return call.finish(turned)


write_cache = define(
    "write_cache_",
    _forward,
    lambda keys, values, k, v, place, q, cos, sin: k.new_empty(0 if q is None else q.shape),
    recipe=_recipe,
)
