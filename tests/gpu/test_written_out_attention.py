"""Attention as models write it out, compiled on a GPU: no product of scores, and right, gradients too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.contract import keeps_contract, targets

pytestmark = pytest.mark.gpu
GPU = "cuda:0"
B, H, K, S, D = 2, 8, 4, 333, 64
SCALE = D**-0.5
Function = Callable[..., Tensor]


def leaf(*shape: int, seed: int = 0) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(GPU, torch.bfloat16).requires_grad_()


def heads() -> list[Tensor]:
    return [leaf(B, count, S, D, seed=seed) for seed, count in enumerate((H, K, K))]


def hidden() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool, device=GPU).triu(1)


def padding() -> Tensor:
    return torch.arange(S, device=GPU) < torch.tensor([[0], [200]], device=GPU)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ repeated(k).mT * SCALE


def repeated(x: Tensor) -> Tensor:
    return x[:, :, None].expand(B, K, H // K, S, D).reshape(B, H, S, D)


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    capped = 2 * torch.tanh(scores(q, k) / 2)
    i, j = torch.arange(S, device=GPU)[:, None], torch.arange(S, device=GPU)
    return capped.masked_fill((j > i) | (j < i - 100), -torch.inf).softmax(-1) @ repeated(v)


def softcap_and_padding(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    capped = 2 * torch.tanh(scores(q, k) / 2)
    return capped.masked_fill(~kept[:, None, None], -1e9).softmax(-1) @ repeated(v)


def with_sink(weights: Tensor, sinks: Tensor) -> Tensor:
    together = torch.cat([weights, sinks.reshape(1, -1, 1, 1).expand(B, -1, S, -1)], -1)
    together = together - together.max(-1, keepdim=True).values
    return F.softmax(together, -1, dtype=together.dtype)[..., :-1]


def sinks(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return with_sink(scores(q, k).masked_fill(hidden(), -torch.inf), sink) @ repeated(v)


def sinks_and_padding(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, kept: Tensor) -> Tensor:
    return with_sink(scores(q, k).masked_fill(~kept[:, None, None], -torch.inf), sink) @ repeated(v)


def gpt_neo(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    lowest = torch.finfo(torch.float32).min
    products = torch.where(seen, q.to(wide) @ repeated(k).to(wide).mT, lowest)
    products = products + torch.full((S, S), -3e38, dtype=q.dtype, device=GPU).triu(1)
    return products.softmax(-1).to(v.dtype) @ repeated(v)


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    slopes = torch.logspace(-1, -8, H, base=2.0, device=GPU)[:, None, None]
    biased = scores(q, k) + slopes * torch.arange(1 - S, 1, device=GPU)
    return biased.masked_fill(hidden(), -3e38).softmax(-1).to(v.dtype) @ repeated(v)


def trained_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    products = scores(q, k)
    products += bias
    return products.softmax(-1) @ repeated(v)


def one_key_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhid,bjd->bhij", q * SCALE, k[:, 0]).softmax(-1)
    return torch.einsum("bhij,bjd->bhid", weights, v[:, 0])


CALLS: dict[str, tuple[Function, Callable[[], list[Tensor]]]] = {
    "soft cap in a window": (softcap, heads),
    "soft cap and padding": (softcap_and_padding, lambda: [*heads(), padding()]),
    "sinks": (sinks, lambda: [*heads(), leaf(H)]),
    "sinks and padding": (sinks_and_padding, lambda: [*heads(), leaf(H), padding()]),
    "GPT-Neo": (gpt_neo, lambda: [*heads(), ~hidden()]),
    "ALiBi in fp32": (alibi, heads),
    "trained bias": (trained_bias, lambda: [*heads(), leaf(H, S, S)]),
    "one key head": (one_key_head, heads),
}


@pytest.mark.parametrize("name", CALLS)
def test_written_out_attention_is_fused_and_right(name: str) -> None:
    function, make = CALLS[name]
    ran = targets(keeps_contract(function, make()))
    assert not any("bmm" in target or "softmax" in target for target in ran)


def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j < 100)


def cap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 2 * torch.tanh(score / 2)


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_flex_attention_in_a_band() -> None:
    blocks: Any = create_block_mask(near, None, None, S, S, device=GPU)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flex_attention(q, k, v, cap, blocks, enable_gqa=True)
        return out

    ran = targets(keeps_contract(function, heads()))
    assert "tilewright.attention.default" in ran and not any("flex" in target for target in ran)
