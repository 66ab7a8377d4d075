"""Calls of `flex_attention`, compiled for a GPU, in Triton's interpreter: against float64 and eager."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.kernels.interpreter import install
from tests.passes.attention.interpreted_kernel import Compiled
from tests.passes.attention.spellings import Function, draw
from tests.passes.attention.test_recognise import check_numbers
from tilewright.records.program import Decision

pytestmark = [
    pytest.mark.usefixtures("in_triton"),
    # Of eager's call.
    pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning"),
]
install()
B, H, K, N, D = 2, 4, 2, 128, 16
SLOPES = torch.linspace(0.1, 0.4, H)


def cap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 2 * torch.tanh(score / 2)


def double(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score * 2


def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + SLOPES[h] * (j - i)


def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j < 20)


def earlier(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The first queries see no key: zeros."""
    return j <= i - 10


def of_heads(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (h == 0) | (i >= j)


def prefix(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) | (j < 16)


NEAR, EARLIER, OF_HEADS, PREFIX = (
    create_block_mask(mask, None, H if mask is of_heads else None, N, N, device="cpu")
    for mask in (near, earlier, of_heads, prefix)
)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = flex_attention(q, k, v, enable_gqa=True)
    return out


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = flex_attention(q, k, v, cap, NEAR, scale=0.4, enable_gqa=True)
    return out


def unseen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = flex_attention(q, k, v, block_mask=EARLIER, enable_gqa=True)
    return out


def run(fn: Function, dtype: torch.dtype = torch.bfloat16) -> tuple[Compiled, Decision]:
    """`fn` keeps the numbers contract; what was decided of it."""
    inputs = draw((B, H, N, D), (B, K, N, D), (B, K, N, D), dtype=dtype)
    compiled = Compiled(fn)
    with torch.no_grad():
        actual, eager = compiled.call(*inputs), fn(*inputs)
        check_numbers([actual], [eager], [fn(*(x.double() for x in inputs))])
    assert actual.stride() == eager.stride()
    (decision,) = (d for d in compiled.record.decisions if "flex" in d.reason)
    return compiled, decision


@pytest.mark.parametrize("fn", [plain, capped, unseen], ids=lambda fn: fn.__name__)
def test_bands_and_soft_caps_run_in_our_kernels(fn: Function) -> None:
    compiled, decision = run(fn)
    assert decision.verdict == "taken"
    assert compiled.targets("tilewright.attention.default") == 1 and compiled.targets("flex_attention") == 0
    (call,) = (
        node
        for graph in compiled.record.graphs
        for node in graph.plan.graph.nodes
        if node.target is torch.ops.tilewright.attention.default
    )
    band = {plain: (None, None), capped: (19, 0), unseen: (None, -10)}[fn]
    assert call.args[8:11] == (*band, 2.0 if fn is capped else 0.0)


def doubled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = flex_attention(q, k, v, double, enable_gqa=True)
    return out


def with_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = flex_attention(q, k, v, alibi, enable_gqa=True)
    return out


def by_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = flex_attention(q, k, v, block_mask=OF_HEADS, enable_gqa=True)
    return out


def with_prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = flex_attention(q, k, v, block_mask=PREFIX, enable_gqa=True)
    return out


def with_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = flex_attention(q, k, v, return_lse=True, enable_gqa=True)
    return out + lse[..., None].to(out.dtype)


@pytest.mark.parametrize(
    ("fn", "dtype", "reason"),
    [
        (doubled, torch.bfloat16, "no soft cap"),
        (with_alibi, torch.bfloat16, "reads tensors"),
        (by_heads, torch.bfloat16, "from head to head"),
        (with_prefix, torch.bfloat16, "no band"),
        (with_sums, torch.bfloat16, "log-sum-exp"),
        (plain, torch.float32, "16 bits"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_other_calls_stay(fn: Function, dtype: torch.dtype, reason: str) -> None:
    compiled, decision = run(fn, dtype)
    assert decision.verdict == "refused" and reason in decision.reason
    assert compiled.targets("tilewright.attention") == 0
