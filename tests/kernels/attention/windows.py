"""Calls of attention within windows, and how far each result is from the numbers contract."""

from typing import NamedTuple

import torch

from tilewright.functional import window_attention
from tilewright.measure.truth.contract import compare
from tilewright.records.measurement import Verified


class Windows(NamedTuple):
    """Sizes of a call; `masks` is 0 where there is none, and `mask_heads` 1 where heads share it."""

    windows: int = 6
    heads: int = 2
    queries: int = 49
    keys: int = 49
    width: int = 32
    value_width: int = 32
    masks: int = 3
    mask_heads: int = 2
    dtype: torch.dtype = torch.bfloat16
    packed: bool = True
    """Whether q, k and v lie in one tensor [windows, places, 3, heads, width], as one linear layer gives them."""


CALLS = [
    Windows(),
    Windows(masks=1, mask_heads=1, dtype=torch.float16),
    Windows(masks=6, heads=3, mask_heads=3, queries=64, keys=64, width=16, value_width=16),
    Windows(masks=0, queries=7, keys=7, width=8, value_width=8),
    Windows(queries=1, keys=13, width=40, value_width=56, packed=False),
    Windows(windows=10, masks=2, queries=16, keys=16, width=64, value_width=64),
    Windows(queries=33, keys=1, packed=False),
]


def inputs(call: Windows, device: torch.device, seed: int = 0) -> list[torch.Tensor | None]:
    """q, k, v and the mask, if there is one: fresh, and each requires a gradient."""
    draw = torch.Generator(device).manual_seed(seed)

    def fresh(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=draw).to(call.dtype)

    if call.packed:
        assert call.queries == call.keys and call.width == call.value_width
        whole = fresh(call.windows, call.queries, 3, call.heads, call.width)
        q, k, v = whole.permute(2, 0, 3, 1, 4).unbind(0)
    else:
        q = fresh(call.windows, call.heads, call.queries, call.width)
        k = fresh(call.windows, call.heads, call.keys, call.width)
        v = fresh(call.windows, call.keys, call.heads, call.value_width).transpose(1, 2)
    mask = None
    if call.masks:
        mask = fresh(call.masks, call.mask_heads, call.queries, call.keys)
        mask[..., call.keys // 2 + 1 :] -= 100.0
    return [None if x is None else x.detach().requires_grad_() for x in (q, k, v, mask)]


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Each step by an operator of PyTorch, in the dtype of the operands."""
    scores = (q * q.shape[3] ** -0.5) @ k.mT
    if mask is not None:
        scores = scores + mask.repeat(q.shape[0] // mask.shape[0], 1, 1, 1)
    return scores.softmax(-1) @ v


def judged(call: Windows, device: torch.device, seed: int = 0) -> list[Verified]:
    """One row for the output and each gradient."""
    given = inputs(call, device, seed)
    exact = [None if x is None else x.detach().double().requires_grad_() for x in given]
    draw = torch.Generator(device).manual_seed(seed + 1)
    shape = (call.windows, call.heads, call.queries, call.value_width)
    dout = torch.randn(shape, device=device, generator=draw).to(call.dtype)
    found = []
    for function, tensors in ((window_attention, given), (written_out, given), (written_out, exact)):
        out = function(*tensors)
        wanted = [x for x in tensors if x is not None]
        found.append([out.detach(), *torch.autograd.grad(out, wanted, dout.to(out.dtype))])
    names = ("out", "dq", "dk", "dv", "dmask")
    return [compare(*three, tensor=name) for name, *three in zip(names, *found, strict=False)]
