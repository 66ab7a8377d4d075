"""Attention, however it is spelled, against the same formula in float64 and against eager's own error."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from tilewright.passes.attention import recognise_attention
from tilewright.records.program import Decision

B, H, N, M, D, DV = 2, 3, 7, 9, 5, 4
INF = math.inf
Function = Callable[..., Tensor]


class Compiled:
    """`fn` through Dynamo and the pass. `decisions` and `graph` are of its last compilation."""

    def __init__(self, fn: Function, finish: Callable[..., Callable[..., object]] | None = None) -> None:
        torch._dynamo.reset()
        self.decisions: list[Decision] = []
        self.finish = finish
        self.call = torch.compile(fn, backend=self.backend, fullgraph=True)

    def backend(self, gm: GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        self.decisions = recognise_attention(gm)
        gm.graph.lint()
        self.graph = gm.graph
        return gm if self.finish is None else self.finish(gm, inputs)

    def taken(self) -> bool:
        fused = [node for node in self.graph.nodes if "scaled_dot_product" in str(node.target)]
        verdicts = [decision.verdict for decision in self.decisions]
        assert len(fused) == verdicts.count("taken")
        return verdicts == ["taken"]


def draw(*shapes: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def heads(dtype: torch.dtype = torch.float32, n: int = N, m: int = N, d: int = D) -> list[Tensor]:
    return draw((B, H, n, d), (B, H, m, d), (B, H, m, d), dtype=dtype)


def value_and_gradients(fn: Function, inputs: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """The output and the gradients of all floating inputs, under a fixed cotangent."""
    leaves = [x.detach().to(dtype) if dtype and x.is_floating_point() else x.detach() for x in inputs]
    leaves = [x.clone(memory_format=torch.preserve_format) for x in leaves]
    wanted = [x.requires_grad_() for x, given in zip(leaves, inputs, strict=True) if given.requires_grad]
    out = fn(*leaves)
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)
    gradients = torch.autograd.grad(out, wanted, cotangent.to(out.dtype)) if wanted else ()
    return [out.detach(), *gradients]


def check_numbers(actual: list[Tensor], eager: list[Tensor], truth: list[Tensor]) -> None:
    """The numbers contract: relative norm error and largest error at most 2× eager's + 4 ulp."""
    for got, plain, exact in zip(actual, eager, truth, strict=True):
        assert got.shape == plain.shape and got.dtype == plain.dtype and got.device == plain.device
        assert torch.equal(got.isnan(), plain.isnan()) and torch.equal(got.isinf(), plain.isinf())
        ulp = torch.finfo(got.dtype).eps
        exact = exact.double().nan_to_num()
        error, bound = ((x.double().nan_to_num() - exact) for x in (got, plain))
        assert error.norm() <= 2 * bound.norm() + 4 * ulp * exact.norm()
        assert error.abs().max() <= 2 * bound.abs().max() + 4 * ulp * exact.abs().max()


def with_gradients(inputs: Sequence[Tensor], count: int = 3) -> list[Tensor]:
    return [x.requires_grad_() if i < count else x for i, x in enumerate(inputs)]


# --- spellings of unmasked and causal attention over q, k, v [B, H, N, D] ---


def plain(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), dim=-1) @ v


def functional(q, k, v):
    return torch.matmul(F.softmax(torch.matmul(q, k.mT) * D**-0.5, dim=3), v)


def methods(q, k, v):
    return q.matmul(k.permute(0, 1, 3, 2)).div(D**0.5).softmax(-1).matmul(v)


def module_softmax(q, k, v):
    return nn.Softmax(dim=-1)((q * D**-0.5) @ k.swapaxes(2, 3)) @ v


def scaled_key(q, k, v):
    return torch.softmax(q @ (k.transpose(-1, -2) * 0.3), -1) @ v


def scaled_both(q, k, v):
    root = D**0.25
    return torch.softmax((q / root) @ (k / root).transpose(-1, -2), -1) @ v


def unscaled(q, k, v):
    return (q @ k.mT).softmax(dim=-1) @ v


def tensor_scale(q, k, v):
    return torch.softmax(q @ k.mT / torch.sqrt(torch.tensor(D)), -1) @ v


def number_first(q, k, v):
    return torch.softmax(0.25 * (q @ k.mT), -1) @ v


def scaled_twice(q, k, v):
    return torch.softmax(torch.mul(torch.div(q @ k.mT, 2.0), 0.7), -1) @ v


def einsums(q, k, v):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(D)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def einsum_sequence_first(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(D**-0.5).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def einsum_reversed(q, k, v):
    weights = torch.einsum("bhkd,bhqd->bhqk", [k, q]).softmax(-1)
    return torch.einsum("bhkd, bhqk -> bqhd", v, weights).reshape(B, N, H * D)


def batched(q, k, v):
    q, k, v = (x.reshape(B * H, N, D) for x in (q, k, v))
    return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) / math.sqrt(D), -1), v)


def baddbmm(q, k, v):
    q, k, v = (x.reshape(B * H, N, D) for x in (q, k, v))
    room = q.new_empty(B * H, N, N)
    return torch.bmm(torch.baddbmm(room, q, k.mT, beta=0, alpha=D**-0.5).softmax(-1), v)


def one_head(q, k, v):
    return torch.softmax(q[0, 0] @ k[0, 0].T / math.sqrt(D), dim=1) @ v[0, 0]


def one_head_mm(q, k, v):
    return torch.mm(torch.softmax(torch.mm(q[0, 1], k[0, 1].t()), 1), v[0, 1])


def three_axes(q, k, v):
    return torch.softmax(q[:, 0] @ k[:, 0].transpose(1, 2), 2) @ v[:, 0]


def five_axes(q, k, v):
    q, k, v = (x.unsqueeze(1).expand(B, 2, H, N, D) for x in (q, k, v))
    return torch.softmax(q @ k.mT, -1) @ v


def given_transposed(q, k, v):
    k = k.reshape(B, H, D, N)
    return torch.softmax(q @ k, -1) @ v


def half_depth_values(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(D), -1) @ v[..., :DV]


def half_depth_keys(q, k, v):
    return torch.softmax(q[..., :DV] @ k[..., :DV].mT / math.sqrt(DV), -1) @ v


def grouped_repeat(q, k, v):
    k, v = (x[:, :1].repeat_interleave(H, 1) for x in (k, v))
    return torch.softmax(q @ k.mT, -1) @ v


def grouped_broadcast(q, k, v):
    return torch.softmax(q @ k[:, :1].mT, -1) @ v[:, :1]


def fewer_keys(q, k, v):
    return torch.softmax(q @ k[:, :, :4].mT, -1) @ v[:, :, :4]


def one_query(q, k, v):
    return torch.softmax(q[:, :, -1:] @ k.mT, -1) @ v


def written_softmax(q, k, v):
    scores = q @ k.mT / math.sqrt(D)
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    return powers / powers.sum(-1, keepdim=True) @ v


def written_max(q, k, v):
    scores = q @ k.mT / math.sqrt(D)
    powers = (scores - scores.max(dim=-1)[0][..., None]).exp()
    return torch.div(powers, powers.sum(dim=-1).unsqueeze(-1)) @ v


def written_values(q, k, v):
    scores = q @ k.mT / math.sqrt(D)
    powers = torch.exp(torch.sub(scores, torch.max(scores, -1, True).values.detach()))
    return powers / torch.sum(powers, 3)[:, :, :, None] @ v


def written_unpacked(q, k, v):
    scores = q @ k.mT
    top, _ = scores.max(-1, keepdim=True)
    powers = torch.exp(scores - top)
    return (powers / powers.sum(-1, True)) @ v


def log_softmax(q, k, v):
    return F.log_softmax(q @ k.mT, -1).exp() @ v


def logsumexp(q, k, v):
    scores = q @ k.mT
    return torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ v


def stabilised(q, k, v):
    scores = q @ k.mT
    return torch.softmax(scores - scores.amax(dim=-1, keepdim=True), -1) @ v


def dropout_off(q, k, v):
    return F.dropout(nn.Dropout(0.0)(torch.softmax(q @ k.mT, -1)), 0.3, training=False) @ v


def merged_heads(q, k, v):
    out = torch.softmax(q @ k.mT, -1) @ v
    return out.transpose(1, 2).contiguous().view(B, N, H * D)


def viewed_result(q, k, v):
    return (torch.softmax(q @ k.mT, -1) @ v).view(B * H, N, D)


def viewed_scores(q, k, v):
    scores = torch.bmm(q.reshape(B * H, N, D), k.reshape(B * H, N, D).mT).view(B, H, N, N)
    return torch.softmax(scores, -1) @ v


SPELLINGS: list[Function] = [
    plain, functional, methods, module_softmax, scaled_key, scaled_both, unscaled, tensor_scale, number_first,
    scaled_twice, einsums, einsum_sequence_first, einsum_reversed, batched, baddbmm, one_head, one_head_mm,
    three_axes, five_axes, given_transposed, half_depth_values, half_depth_keys, grouped_repeat,
    grouped_broadcast, fewer_keys, one_query, written_softmax, written_max, written_values, written_unpacked,
    log_softmax, logsumexp, stabilised, dropout_off, merged_heads, viewed_result, viewed_scores,
]  # fmt: skip


def causal_tril(q, k, v):
    mask = torch.tril(torch.ones(N, N))
    return (q @ k.mT).masked_fill(mask == 0, -INF).softmax(-1) @ v


def causal_triu(q, k, v):
    mask = torch.triu(torch.full((N, N), -INF), diagonal=1)
    return torch.softmax(q @ k.mT / math.sqrt(D) + mask, -1) @ v


def causal_arange(q, k, v):
    i = torch.arange(N)
    return torch.where(i[:, None] >= i[None, :], q @ k.mT, -INF).softmax(-1) @ v


def causal_view(q, k, v):
    mask = torch.ones(N, N, dtype=torch.bool).tril().view(1, 1, N, N)
    return (q @ k.mT).masked_fill(~mask, torch.finfo(q.dtype).min).softmax(-1) @ v


def causal_like(q, k, v):
    scores = q @ k.mT
    mask = torch.ones_like(scores[0, 0]).triu(1).bool()
    return scores.masked_fill(mask, -INF).softmax(-1) @ v


def causal_where(q, k, v):
    scores = q @ k.mT / 2
    hidden = torch.triu(torch.ones(N, N, dtype=torch.bool), 1)
    return torch.softmax(torch.where(hidden, torch.tensor(-INF), scores), -1) @ v


def causal_scaled_after(q, k, v):
    mask = torch.triu(torch.full((N, N), -INF), 1)
    return torch.softmax((q @ k.mT + mask) / math.sqrt(D), -1) @ v


CAUSAL: list[Function] = [
    causal_tril, causal_triu, causal_arange, causal_view, causal_like, causal_where, causal_scaled_after,
]  # fmt: skip


@pytest.mark.parametrize("fn", [*SPELLINGS, *CAUSAL], ids=lambda fn: fn.__name__)
def test_spelling_is_fused(fn: Function) -> None:
    inputs = with_gradients(heads())
    compiled = Compiled(fn)
    actual = value_and_gradients(compiled.call, inputs)
    assert compiled.taken(), compiled.decisions
    (decision,) = compiled.decisions
    assert decision.passed_by == "attention" and decision.bytes_saved >= 4 * N
    assert decision.source is not None and decision.source.startswith("test_attention.py:")
    names = {str(node.target) for node in compiled.graph.nodes}
    assert not any("softmax" in name or "triu" in name or "arange" in name for name in names)
    (fused,) = (node for node in compiled.graph.nodes if "scaled_dot_product" in str(node.target))
    assert fused.args[4] is (fn in CAUSAL) and fused.kwargs["attn_mask"] is None
    for node in compiled.graph.nodes:
        assert not node.users or "example_value" in node.meta
    eager = value_and_gradients(fn, inputs)
    assert actual[0].stride() == eager[0].stride()
    check_numbers(actual, eager, value_and_gradients(fn, inputs, torch.float64))


# --- masks that stay masks: q, k, v, mask ---


def added(q, k, v, mask):
    return torch.softmax(q @ k.mT / math.sqrt(D) + mask, -1) @ v


def added_first(q, k, v, mask):
    return torch.softmax((mask + q @ k.mT) * 0.5, -1) @ v


def added_twice(q, k, v, mask):
    return torch.softmax(q @ k.mT + mask + torch.ones(N, N).tril(), -1) @ v


def added_padding(q, k, v, keep):
    return torch.softmax(q @ k.mT + (1.0 - keep[:, None, None, :].to(q.dtype)) * -10000.0, -1) @ v


def added_by_baddbmm(q, k, v, mask):
    q, k, v = (x.reshape(B * H, N, D) for x in (q, k, v))
    return torch.baddbmm(mask, q, k.mT, alpha=0.5).softmax(-1) @ v


def added_between_views(q, k, v, mask):
    q, k, v = (x.reshape(B * H, N, D) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(B, H, N, N) + mask
    return torch.bmm(torch.softmax(scores.view(B * H, N, N), -1), v).view(B, H, N, D)


def added_batch(q, k, v, mask):
    return torch.softmax(q[:, 0] @ k[:, 0].mT + mask, -1) @ v[:, 0]


def filled(q, k, v, drop):
    return (q @ k.mT / math.sqrt(D)).masked_fill(drop, -INF).softmax(-1) @ v


def filled_low(q, k, v, drop):
    return (q @ k.mT / math.sqrt(D)).masked_fill(drop, torch.finfo(q.dtype).min).softmax(-1) @ v


def filled_billion(q, k, v, drop):
    return torch.masked_fill(q @ k.mT, drop, -1e9).softmax(-1) @ v


def filled_where(q, k, v, drop):
    return torch.where(drop == 0, q @ k.mT, -INF).softmax(-1) @ v


def filled_method(q, k, v, drop):
    return (q @ k.mT).where(~drop, torch.tensor(-1e30)).softmax(-1) @ v


def filled_padding(q, k, v, keep):
    return (q @ k.mT).masked_fill(~keep[:, None, None, :], -INF).softmax(-1) @ v


def filled_causal_padding(q, k, v, keep):
    scores = (q @ k.mT).masked_fill(torch.ones(N, N).triu(1) == 1, -INF)
    return scores.masked_fill(~keep[:, None, None, :], -INF).softmax(-1) @ v


def filled_and_added(q, k, v, mask):
    scores = (q @ k.mT).masked_fill(torch.ones(N, N).triu(1) == 1, -INF)
    return torch.softmax(scores + mask, -1) @ v


def filled_batch(q, k, v, drop):
    return (q[:, 0] @ k[:, 0].mT).masked_fill(drop, -1e9).softmax(-1) @ v[:, 0]


def window(q, k, v, mask):
    i = torch.arange(N)
    near = (i[:, None] - i[None, :]).abs() <= 2
    return (q @ k.mT).masked_fill(~near, -INF).softmax(-1) @ v


FLOAT_MASK, DROPPED_ROW = draw((N, N), seed=1)[0], torch.zeros(N, N, dtype=torch.bool)
DROPPED_ROW[3], DROPPED_ROW[:, 1] = True, True
LOST_ROW = FLOAT_MASK.masked_fill(DROPPED_ROW, -INF)
LONG_KEEP = torch.arange(N).expand(B, N) < torch.tensor([[4], [N]])
NO_KEEP = torch.arange(N).expand(B, N) < torch.tensor([[0], [N]])
MASKED: list[tuple[Function, Tensor]] = [
    (added, FLOAT_MASK), (added, LOST_ROW), (added, FLOAT_MASK[None, None, :1]), (added, FLOAT_MASK[0]),
    (added, FLOAT_MASK.expand(H, N, N)), (added, draw((B, H, N, N), seed=2)[0]), (added, DROPPED_ROW),
    (added, FLOAT_MASK[:, :1].masked_fill(FLOAT_MASK[:, :1] > 1, -INF)), (added_first, LOST_ROW),
    (added_twice, LOST_ROW), (added_padding, LONG_KEEP), (added_padding, NO_KEEP),
    (added_by_baddbmm, draw((B * H, N, N), seed=3)[0]), (added_between_views, LOST_ROW),
    (added_between_views, draw((B, 1, N, N), seed=3)[0]), (added_batch, draw((B, N, N), seed=3)[0]),
    (filled, DROPPED_ROW), (filled, DROPPED_ROW.triu()), (filled_low, DROPPED_ROW), (filled_billion, DROPPED_ROW),
    (filled_where, DROPPED_ROW), (filled_method, DROPPED_ROW), (filled_padding, LONG_KEEP),
    (filled_padding, NO_KEEP), (filled_causal_padding, LONG_KEEP), (filled_causal_padding, NO_KEEP),
    (filled_and_added, LOST_ROW), (filled_batch, DROPPED_ROW), (filled_batch, DROPPED_ROW.expand(B, N, N)),
    (window, FLOAT_MASK),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "mask"), MASKED, ids=[f"{fn.__name__}-{i}" for i, (fn, _) in enumerate(MASKED)]
)
def test_mask_is_passed_on(fn: Function, mask: Tensor) -> None:
    inputs = [*with_gradients(heads()), mask]
    compiled = Compiled(fn)
    actual = value_and_gradients(compiled.call, inputs)
    assert compiled.taken(), compiled.decisions
    (fused,) = (node for node in compiled.graph.nodes if "scaled_dot_product" in str(node.target))
    assert fused.args[4] is False and fused.kwargs["attn_mask"] is not None
    eager = value_and_gradients(fn, inputs)
    check_numbers(actual, eager, value_and_gradients(fn, inputs, torch.float64))
