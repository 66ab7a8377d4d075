"""Attention as people write it: unmasked and causal, masked, in other dtypes, and not to be fused.

`q`, `k` and `v` are [B, H, N, D]. The files beside this one say what must become of each.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, H, N, D, DV = 2, 3, 7, 5, 4
INF = math.inf
Function = Callable[..., Tensor]


def draw(*shapes: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


# --- spellings of unmasked and causal attention over q, k, v [B, H, N, D] ---


def plain(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), dim=-1) @ v


def scaled_both(q, k, v):
    root = D**0.25
    return torch.softmax((q / root) @ (k / root).transpose(-1, -2), -1) @ v


def einsum_sequence_first(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(D**-0.5).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def einsum_one_key_head(q, k, v):
    weights = torch.einsum("bhid,bjd->bhij", q, k[:, 0]).softmax(-1)
    return torch.einsum("bhij,bjd->bhid", weights, v[:, 0])


def einsum_grouped(q, k, v):
    q = q.unflatten(1, (1, H))
    weights = torch.einsum("bghqd,bgkd->bghqk", q, k[:, :1]).softmax(-1)
    return torch.einsum("bghqk,bgkd->bqghd", weights, v[:, :1]).flatten(2)


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


def grouped_repeat(q, k, v):
    k, v = (x[:, :1].repeat_interleave(H, 1) for x in (k, v))
    return torch.softmax(q @ k.mT, -1) @ v


def grouped_broadcast(q, k, v):
    return torch.softmax(q @ k[:, :1].mT, -1) @ v[:, :1]


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


def logsumexp(q, k, v):
    scores = q @ k.mT
    return torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ v


def stabilised(q, k, v):
    scores = q @ k.mT
    return torch.softmax(scores - scores.amax(dim=-1, keepdim=True), -1) @ v


def value_written_first(q, k, v):
    weights = torch.softmax(q @ k.mT, -1)
    v = v.clone()
    v[:, :, 0] = 0
    return weights @ v


def merged_heads(q, k, v):
    out = torch.softmax(q @ k.mT, -1) @ v
    return out.transpose(1, 2).contiguous().view(B, N, H * D)


def viewed_scores(q, k, v):
    scores = torch.bmm(q.reshape(B * H, N, D), k.reshape(B * H, N, D).mT).view(B, H, N, N)
    return torch.softmax(scores, -1) @ v


def in_place_scale(q, k, v):
    scores = q @ k.mT
    scores *= 0.5
    return torch.softmax(scores, -1) @ v


def in_place_views(q, k, v):
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(B, H, N, N)
    scores /= math.sqrt(D)
    scores.mul_(0.5)
    return torch.softmax(scores, -1) @ v


LONGER: list[Function] = [
    plain, scaled_both, einsum_sequence_first, einsum_one_key_head, einsum_grouped, einsum_reversed, batched,
    baddbmm, three_axes, five_axes, given_transposed, half_depth_values, grouped_repeat, grouped_broadcast,
    written_softmax, written_max, written_values, logsumexp, stabilised, value_written_first, merged_heads,
    viewed_scores, in_place_scale, in_place_views,
]  # fmt: skip
SPELLINGS: dict[str, Function] = {fn.__name__: fn for fn in LONGER} | {
    "functional": lambda q, k, v: torch.matmul(F.softmax(torch.matmul(q, k.mT) * D**-0.5, dim=3), v),
    "methods": lambda q, k, v: q.matmul(k.permute(0, 1, 3, 2)).div(D**0.5).softmax(-1).matmul(v),
    "module_softmax": lambda q, k, v: nn.Softmax(dim=-1)((q * D**-0.5) @ k.swapaxes(2, 3)) @ v,
    "scaled_key": lambda q, k, v: torch.softmax(q @ (k.transpose(-1, -2) * 0.3), -1) @ v,
    "rounded_key": lambda q, k, v: torch.softmax(q @ torch.div(k, 0.5, rounding_mode="floor").mT, -1) @ v,
    "tensor_scale": lambda q, k, v: torch.softmax(q @ k.mT / torch.sqrt(torch.tensor(D)), -1) @ v,
    "nothing_added": lambda q, k, v: torch.softmax(0 + q @ k.mT * 0.3 + 0.0 + torch.zeros(()), -1) @ v,
    "number_first": lambda q, k, v: torch.softmax(0.25 * (q @ k.mT), -1) @ v,
    "one_head_mm": lambda q, k, v: torch.mm(torch.softmax(torch.mm(q[0, 1], k[0, 1].t()), 1), v[0, 1]),
    "half_depth_keys": lambda q, k, v: torch.softmax(q[..., :DV] @ k[..., :DV].mT / math.sqrt(DV), -1) @ v,
    "fewer_keys": lambda q, k, v: torch.softmax(q @ k[:, :, :4].mT, -1) @ v[:, :, :4],
    "one_query": lambda q, k, v: torch.softmax(q[:, :, -1:] @ k.mT, -1) @ v,
    "log_softmax": lambda q, k, v: F.log_softmax(q @ k.mT, -1).exp() @ v,
    "dropout_off": lambda q, k, v: F.dropout(nn.Dropout(0.0)(torch.softmax(q @ k.mT, -1)), 0.3, training=False) @ v,
}


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


def added_to_rows_and_views(q, k, v, mask):
    """BLOOM's: ALiBi by batch and head in one axis, then a causal mask with two."""
    slopes = torch.pow(torch.full((), 0.5), torch.arange(1, 1 + H))
    alibi = (slopes[:, None] * (torch.ones(B, N).cumsum(-1) - 1)[:, None, :]).reshape(B * H, 1, N).to(q.dtype)
    q, k, v = (x.reshape(B * H, N, D) for x in (q, k, v))
    scores = alibi.baddbmm(batch1=q, batch2=k.mT, beta=1.0, alpha=0.5).view(B, H, N, N) + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(weights.view(B * H, N, N), v)


def added_once_written(q, k, v, mask):
    """Swin's: the mask is made in place between the product and the softmax."""
    scores = q @ k.mT
    written = torch.zeros(N, N)
    written[:3, 2:] = -7.0
    written[:, :] += mask
    return torch.softmax(scores + written, -1) @ v


def added_batch(q, k, v, mask):
    return torch.softmax(q[:, 0] @ k[:, 0].mT + mask, -1) @ v[:, 0]


def filled(q, k, v, drop):
    return (q @ k.mT / math.sqrt(D)).masked_fill(drop, -INF).softmax(-1) @ v


def filled_in_place(q, k, v, mask):
    scores = (q @ k.mT).mul_(0.3)
    scores.masked_fill_(mask, -INF)
    return scores.softmax(-1) @ v


def added_in_place(q, k, v, mask):
    scores = q @ k.mT
    scores += mask
    return scores.softmax(-1) @ v


def filled_low_then_added(q, k, v, mask):
    shown = torch.ones(N, N, dtype=torch.bool).tril()
    scores = torch.where(shown, q @ k.mT, torch.finfo(q.dtype).min)
    return (scores + mask).softmax(-1) @ v


def added_then_filled_low(q, k, v, mask):
    scores = q @ k.mT + mask
    return scores.masked_fill(mask > 1, torch.finfo(q.dtype).min).softmax(-1) @ v


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


def two_known_fills(q, k, v):
    scores = (q @ k.mT).masked_fill(torch.ones(N, N).triu(2) == 1, -1e9)
    return scores.masked_fill(torch.ones(N, N).tril(-3) == 1, -INF).softmax(-1) @ v


def window(q, k, v, mask):
    i = torch.arange(N)
    near = (i[:, None] - i[None, :]).abs() <= 2
    return (q @ k.mT).masked_fill(~near, -INF).softmax(-1) @ v


FLOAT_MASK, DROPPED_ROW = draw((N, N), seed=1)[0], torch.zeros(N, N, dtype=torch.bool)
DROPPED_ROW[3], DROPPED_ROW[:, 1] = True, True
LOST_ROW = FLOAT_MASK.masked_fill(DROPPED_ROW, -INF)
LOW_ROWS = torch.zeros(N, N).index_fill(0, torch.tensor([2, 5]), -1e4)
LONG_KEEP = torch.arange(N).expand(B, N) < torch.tensor([[4], [N]])
NO_KEEP = torch.arange(N).expand(B, N) < torch.tensor([[0], [N]])
MASKED: list[tuple[Function, Tensor]] = [
    (added, FLOAT_MASK), (added, LOST_ROW), (added, FLOAT_MASK[None, None, :1]), (added, FLOAT_MASK[0]),
    (added, FLOAT_MASK.expand(H, N, N)), (added, draw((B, H, N, N), seed=2)[0]), (added, DROPPED_ROW),
    (added, FLOAT_MASK[:, :1].masked_fill(FLOAT_MASK[:, :1] > 1, -INF)), (added_first, LOST_ROW),
    (added_twice, LOST_ROW), (added_padding, LONG_KEEP), (added_padding, NO_KEEP),
    (added_once_written, FLOAT_MASK), (added_by_baddbmm, draw((B * H, N, N), seed=3)[0]),
    (added_between_views, LOST_ROW),
    (added_between_views, draw((B, 1, N, N), seed=3)[0]), (added_to_rows_and_views, LOST_ROW),
    (added_to_rows_and_views, draw((B, 1, N, N), seed=3)[0]), (added_batch, draw((B, N, N), seed=3)[0]),
    (filled, DROPPED_ROW), (filled, DROPPED_ROW.triu()), (filled_low, DROPPED_ROW), (filled_billion, DROPPED_ROW),
    (filled_where, DROPPED_ROW), (filled_method, DROPPED_ROW), (filled_padding, LONG_KEEP),
    (filled_padding, NO_KEEP), (filled_causal_padding, LONG_KEEP), (filled_causal_padding, NO_KEEP),
    (filled_and_added, FLOAT_MASK), (added, LOW_ROWS), (added, LOW_ROWS * 1e5),
    (filled_batch, DROPPED_ROW), (filled_batch, DROPPED_ROW.expand(B, N, N)),
    (window, FLOAT_MASK),
    (filled_in_place, DROPPED_ROW), (filled_low_then_added, FLOAT_MASK),
    (added_then_filled_low, FLOAT_MASK), (added_in_place, LOST_ROW),
]  # fmt: skip


# --- dtypes ---


def softmax_in_fp32(q, k, v):
    return F.softmax((q @ k.mT / math.sqrt(D)).float(), dim=-1).to(q.dtype) @ v


def softmax_dtype(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(D), -1, dtype=torch.float32).type_as(v) @ v


def scores_in_fp32(q, k, v):
    return torch.softmax(q.float() @ k.float().transpose(-2, -1) / math.sqrt(D), -1).to(v.dtype) @ v


def all_in_fp32(q, k, v):
    return (torch.softmax(q.float() @ k.float().mT / math.sqrt(D), -1) @ v.float()).to(v.dtype)


def causal_in_fp32(q, k, v):
    scores = (q @ k.mT).float() + torch.triu(torch.full((N, N), -INF), 1)
    return scores.softmax(-1).to(v.dtype) @ v


def gpt_neo(q, k, v):
    """As transformers writes it, a mask of its own beside the causal one."""
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2))
    lowest = torch.tensor(torch.finfo(scores.dtype).min, dtype=scores.dtype)
    scores = torch.where(torch.ones(N, N, dtype=torch.bool).tril()[None, None], scores, lowest)
    scores = scores + torch.full((N, N), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
    return torch.matmul(F.softmax(scores, dim=-1).to(v.dtype), v)


def in_autocast(q, k, v):
    with torch.autocast("cpu", torch.bfloat16):
        return torch.softmax(q @ k.mT / math.sqrt(D), -1) @ v


IN_FP32 = [
    (softmax_in_fp32, plain),
    (softmax_dtype, plain),
    (scores_in_fp32, plain),
    (all_in_fp32, plain),
    (causal_in_fp32, causal_tril),
    (gpt_neo, causal_tril),
]


# --- refusals ---


def training_dropout(q, k, v):
    return F.dropout(torch.softmax(q @ k.mT, -1), 0.1) @ v


def returned_weights(q, k, v):
    weights = torch.softmax(q @ k.mT, -1)
    return weights @ v, weights


def used_scores(q, k, v):
    scores = q @ k.mT
    return torch.softmax(scores, -1) @ v + scores.sum(-1, keepdim=True)


def write_seen_elsewhere(q, k, v):
    scores = q @ k.mT
    rows = scores.view(-1, N)
    scores *= 0.5
    return torch.softmax(scores, -1) @ v + rows.sum()


def written_query(q, k, v):
    q = q.clone()
    weights = torch.softmax(q @ k.mT, -1)
    q[:, :, 0] = 0
    return weights @ v


def no_maximum(q, k, v):
    powers = torch.exp(q @ k.mT)
    return powers / powers.sum(-1, keepdim=True) @ v


def normalised_later(q, k, v):
    scores = q @ k.mT
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    return powers @ v / powers.sum(-1, keepdim=True)


def weak_fill(q, k, v):
    return (q @ k.mT).masked_fill(torch.ones(N, N).triu(1) == 1, -100.0).softmax(-1) @ v


def mask_of_scores(q, k, v):
    scores = q @ k.mT
    return scores.masked_fill(scores < 0, -INF).softmax(-1) @ v


def two_fills(q, k, v):
    scores = (q @ k.mT).masked_fill(v[..., :1].mT > 1, -1e9)
    return scores.masked_fill(torch.ones(N, N).tril(-3) == 1, -INF).softmax(-1) @ v


def mode_change(q, k, v):
    scores = q @ k.mT
    with torch.no_grad():
        weights = torch.softmax(scores, -1)
    return weights @ v


REFUSED: dict[str, tuple[Function, str]] = {
    "training_dropout": (training_dropout, "dropout on the weights"),
    "returned_weights": (returned_weights, "the weights are used by"),
    "used_scores": (used_scores, "is also used by"),
    "write_seen_elsewhere": (write_seen_elsewhere, "in place"),
    "written_query": (written_query, "to what they read"),
    "no_maximum": (no_maximum, "row maximum"),
    "normalised_later": (normalised_later, "not normalised"),
    "over_queries": (lambda q, k, v: torch.softmax(q @ k.mT, -2) @ v, "last axis"),
    "weak_fill": (weak_fill, "keep some weight"),
    "negative_scale": (lambda q, k, v: torch.softmax(q @ k.mT * -1.0, -1) @ v, "scaled by -1"),
    "changed_weights": (lambda q, k, v: torch.softmax(q @ k.mT, -1).nan_to_num() @ v, "nan_to_num between"),
    "clipped_scores": (lambda q, k, v: torch.softmax(torch.tanh(q @ k.mT), -1) @ v, "tanh between"),
    "trained_bias": (lambda q, k, v: torch.softmax(q @ k.mT + v.mean((0, 1, 3)), -1) @ v, "needs a gradient"),
    "mask_of_scores": (mask_of_scores, "is also used by"),
    "two_fills": (two_fills, "different ways"),
    "empty": (lambda q, k, v: torch.softmax(q[:0] @ k[:0].mT, -1) @ v[:0], "empty"),
    "mode_change": (mode_change, "mode"),
}
