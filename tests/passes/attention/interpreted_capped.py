"""Scores under a soft cap written out, compiled for a GPU, in Triton's interpreter: against float64 and eager."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.attention.interpreted_kernel import inferred, trained
from tests.passes.attention.spellings import Function, draw

pytestmark = pytest.mark.usefixtures("in_triton")
B, H, K, N, D = 2, 4, 2, 21, 16
CAP = 2.0
"""About the size of the scores, so that the cap changes most of them."""


def capped(scores: Tensor) -> Tensor:
    return CAP * torch.tanh(scores / CAP)


def keep(fewest: int) -> Tensor:
    """Which keys are no padding; so many in the first entry."""
    return torch.arange(N).expand(B, N) < torch.tensor([[fewest], [N - 5]])


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return capped(q @ k.mT * D**-0.5).softmax(-1) @ v


def to_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(q @ k.mT).softmax(-1) @ v


def gemma(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As transformers writes it, heads of keys repeated."""
    k, v = (x[:, :K][:, :, None].expand(B, K, H // K, N, D).reshape(B, H, N, D) for x in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * D**-0.5
    scores = torch.tanh(scores / CAP) * CAP
    scores = scores + torch.full((N, N), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)[None, None]
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = torch.arange(N)[:, None], torch.arange(N)
    scores = capped(torch.einsum("bhid,bhjd->bhij", q, k) * D**-0.5)
    scores = scores.masked_fill((j > i) | (j <= i - 5), -torch.inf)
    return torch.einsum("bhij,bhjd->bhid", scores.float().softmax(-1).to(v.dtype), v)


def more_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first queries see no key and weigh all alike."""
    k, v = k[:, :, : N - 4], v[:, :, : N - 4]
    hidden = torch.ones(N, N - 4, dtype=torch.bool).triu(-3)
    return capped(q @ k.mT).masked_fill(hidden, -1e9).softmax(-1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    return capped(q @ k.mT).masked_fill(~kept[:, None, None], -torch.inf).softmax(-1) @ v


def padding_added(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    mask = (1.0 - kept[:, None, None].to(q.dtype)) * torch.finfo(q.dtype).min
    return (capped(q @ k.mT) + mask).softmax(-1) @ v


BF16, FP16 = torch.bfloat16, torch.float16
CALLS: list[tuple[Function, torch.dtype, list[Tensor]]] = [
    *[(fn, BF16, []) for fn in (to_one, gemma, more_queries)],
    *[(fn, FP16, []) for fn in (plain, window)],
    (padded, FP16, [keep(0)]),
    # Autograd passes an added mask by, also where nothing is left of the scores beside it.
    (padding_added, BF16, [keep(3)]),
]


@pytest.mark.parametrize(("fn", "dtype", "masks"), CALLS, ids=lambda x: getattr(x, "__name__", str(x).split("(")[0]))
def test_capped_scores_run_in_our_kernels(fn: Function, dtype: torch.dtype, masks: list[Tensor]) -> None:
    inputs = [*(x.requires_grad_() for x in draw(*[(B, H, N, D)] * 3, dtype=dtype)), *masks]
    compiled = trained(fn, inputs)
    assert compiled.targets("tilewright.attention_backward.default") == 1
    assert compiled.targets("bmm") == 0
    call = compiled.attention
    assert call.args[10] == (1.0 if fn is to_one else CAP)
    assert (call.args[3] is None) == (fn in (plain, to_one, window, gemma))
    # Heads that share keys read them once.
    assert call.args[1].meta["val"].shape[1] == (K if fn is gemma else H)


def masked_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return capped((q @ k.mT).masked_fill(torch.ones(N, N).triu(1) == 1, -torch.inf)).softmax(-1) @ v


def capped_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return capped(capped(q @ k.mT)).softmax(-1) @ v


@pytest.mark.parametrize(
    ("fn", "dtype", "reason"),
    [
        (masked_inside, torch.bfloat16, "after they were masked"),
        (capped_twice, torch.bfloat16, "capped again"),
        (plain, torch.float32, "measured in 16 bits"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_what_stays_written_out(fn: Function, dtype: torch.dtype, reason: str) -> None:
    compiled = inferred(fn, draw(*[(B, H, N, D)] * 3, dtype=dtype))
    (decision,) = (d for d in compiled.record.decisions if d.passed_by == "attention")
    assert decision.verdict == "refused" and reason in decision.reason
