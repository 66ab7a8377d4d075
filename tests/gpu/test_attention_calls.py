"""Calls of `scaled_dot_product_attention` as models make them, compiled on a GPU: fused and right, gradients too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.contract import check, keeps_contract, recorded, targets
from tests.gpu.test_compiled_attention import on_hopper

pytestmark = pytest.mark.gpu
GPU = "cuda:0"
B, H, S, D = 4, 8, 384, 64
UNFUSED = ("aten.bmm.default", "aten._softmax.default", "aten._safe_softmax.default")


def heads(count: int = H, length: int = S, width: int = D, trained: bool = True) -> Tensor:
    """[B, heads, S, D] as a linear layer leaves it."""
    x = torch.randn(B, length, count, width, device=GPU, dtype=torch.bfloat16).transpose(1, 2)
    return x.detach().requires_grad_(trained)


def triple(**options: Any) -> list[Tensor]:
    return [heads(**options) for _ in range(3)]


def rows() -> Tensor:
    return torch.arange(S, device=GPU)[None, None, :, None]


def columns(size: int = S) -> Tensor:
    return torch.arange(size, device=GPU)[None, None, None, :]


def vit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, (rows() >= 0).expand(B, 1, S, S))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, (columns() <= rows()).expand(B, 1, S, S))


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = (columns() <= rows()) & (columns() > rows() - 100)
    return F.scaled_dot_product_attention(q, k, v, seen.expand(B, 1, S, S))


def bert(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    padding = (torch.arange(S, device=GPU) < lengths[:, None])[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, ((rows() >= 0) & padding).expand(B, 1, S, S))


def padded_causal(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    padding = (torch.arange(S, device=GPU) < lengths[:, None])[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, (columns() <= rows()) & padding)


def t5(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    bias = table.permute(2, 0, 1)[None]
    bias = torch.where((rows() >= 0).expand(B, 1, S, S), bias, torch.finfo(bias.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, bias, scale=0.1)


def t5_decoder(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    bias = torch.where(columns() <= rows(), table.permute(2, 0, 1)[None], torch.finfo(table.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, bias, scale=0.1)


def llama(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :, None].expand(B, 2, H // 2, S, D).reshape(B, H, S, D) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, (columns() <= rows()).expand(B, 1, S, S))


def added(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, bias)


def three_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))


def lengths() -> Tensor:
    return torch.tensor([S, S - 7, 200, 1], device=GPU)


def table(trained: bool) -> Tensor:
    return torch.randn(S, S, H, device=GPU, dtype=torch.bfloat16, requires_grad=trained)


def bias(*shape: int) -> Tensor:
    return torch.randn(shape, device=GPU, dtype=torch.bfloat16, requires_grad=True)


OURS = "tilewright.attention.default"
CALLS: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]], bool]] = {
    "vit": (vit, triple, True),
    "causal": (causal, triple, True),
    "window": (window, triple, True),
    "llama": (llama, lambda: [heads(), heads(2), heads(2)], True),
    "bert": (bert, lambda: [*triple(), lengths()], False),
    "padded causal": (padded_causal, lambda: [*triple(), lengths()], False),
    "t5, inference": (t5, lambda: [*triple(trained=False), table(False)], False),
    "t5": (t5, lambda: [*triple(), table(True)], False),
    "t5's decoder": (t5_decoder, lambda: [*triple(), table(True)], False),
    "odd lengths and a bias": (added, lambda: [*triple(length=197), bias(1, H, 197, 197)], False),
    "three axes": (three_axes, triple, True),
}
"""By name: the function, its operands, and whether Hopper's kernels take it."""


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_fused_and_right(name: str) -> None:
    function, make, ours = CALLS[name]
    operands = make()
    training = any(x.requires_grad for x in operands)
    ran = targets(keeps_contract(function, operands, training=training))
    assert not set(UNFUSED) & set(ran)
    if on_hopper():
        assert (OURS in ran) == ours
        assert any("scaled_dot_product" in target for target in ran) != ours


@pytest.mark.parametrize("trained", [False, True])
def test_a_bias_for_each_query(trained: bool) -> None:
    """PyTorch expands it over the keys, and its memory-efficient kernel raises: eager is given one with rows."""

    def by_rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias.expand(B, 1, S, S).contiguous())

    operands = [*triple(), bias(B, 1, S, 1).detach().requires_grad_(trained)]
    call, record = recorded(added)
    check(by_rows, call, operands)
    assert not set(UNFUSED) & set(targets(record))


@pytest.mark.parametrize("count", [1, H])
@pytest.mark.parametrize("queries", [S, 197])
def test_a_bias_that_alone_is_trained(count: int, queries: int) -> None:
    """PyTorch keeps no log-sum-exp for it and its backward fails: eager is given a query that needs a gradient."""

    def with_query(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return added(q.detach().requires_grad_(), k, v, bias)

    operands = [heads(count, queries, trained=False), *(heads(count, trained=False) for _ in range(2))]
    call, record = recorded(added)
    check(with_query, call, [*operands, bias(1, count, queries, S)])
    assert not set(UNFUSED) & set(targets(record))


@pytest.mark.parametrize("position", [0, 700, 1023])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_a_token_against_a_static_cache(position: int, kv_heads: int) -> None:
    def decode(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        seen = (columns(1024) <= at).expand(B, 1, 1, 1024)
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)

    q = heads(length=1, trained=False)
    cache = [heads(kv_heads, 1024, trained=False).contiguous() for _ in range(2)]
    operands = [q, *cache, torch.tensor(position, device=GPU)]
    record = keeps_contract(decode, operands, training=False)
    assert targets(record).count("tilewright.attention_prefix.default") == 1
    (choice,) = (d for d in record.decisions if d.passed_by == "attention")
    assert "split over the keys" in choice.reason


def test_dropout_beside_a_bias_that_is_trained() -> None:
    """Its mask is the memory-efficient kernel's own; where every weight is equal, its mean is what dropout keeps."""

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, bias, dropout_p=0.25)

    q = torch.zeros(B, H, S, D, device=GPU, dtype=torch.bfloat16)
    ones = torch.ones_like(q)
    zeros = torch.zeros(1, H, S, S, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    call, record = recorded(function)
    out = call(q, q, ones, zeros)
    assert not set(UNFUSED) & set(targets(record))
    torch.testing.assert_close(out.float().mean(), torch.ones((), device=GPU), rtol=0.01, atol=0)
    (gradient,) = torch.autograd.grad(out.float().square().sum(), zeros)
    assert gradient.isfinite().all() and gradient.abs().sum() > 0
