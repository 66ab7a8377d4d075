"""The backward of fused attention on a CPU: as exact as that of attention written out, whatever its shape."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.gpu.kernels.launching import in_turn
from tilewright.backend import backend, recording
from tilewright.measure.truth.contract import compare
from tilewright.measure.truth.verify import verify
from tilewright.runtime.attention_backward import OPERATOR, attention_backward

SHAPES = {
    "square": (2, 3, 19, 19, 8),
    "more queries than a block has": (1, 2, 300, 133, 16),
    "one key": (3, 1, 5, 1, 4),
    "one query": (1, 2, 1, 131, 3),
    "three columns": (1, 1, 257, 257, 3),
}


def written_out(given: Sequence[Tensor], mask: Tensor | None = None, scale: float = 0.4) -> list[Tensor]:
    grad, *rest = given
    leaves = [x.detach().clone().requires_grad_() for x in rest]
    scores = leaves[0] @ leaves[1].mT * scale
    out = torch.softmax(scores if mask is None else scores + mask, -1) @ leaves[2]
    return list(torch.autograd.grad(out, leaves, grad))


def operands(shape: Sequence[int], dtype: torch.dtype, spread: float) -> list[Tensor]:
    """grad, q, k, v; scores with a standard deviation of about `spread`²; heads between positions in memory."""
    batch, heads, queries, keys, depth = shape
    torch.manual_seed(7)
    rows = (queries, queries, keys, keys)
    drawn = [torch.randn(batch, n, heads, depth).transpose(1, 2) for n in rows]
    return [(x * spread if i in (1, 2) else x).to(dtype) for i, x in enumerate(drawn)]


def ours(given: Sequence[Tensor], causal: bool = False, mask: Tensor | None = None, scale: float = 0.4) -> list[Tensor]:
    grad, q, k, v = given
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = forward(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return list(attention_backward()(grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale))


@pytest.mark.parametrize(
    ("shape", "masked", "kind"),
    in_turn(
        itertools.product(SHAPES.values(), ["no mask", "causal", "added", "of keys"]),
        [[(dtype, spread) for spread in (2.0, 1.0) for dtype in (torch.float32, torch.bfloat16, torch.float16)]],
    ),
    ids=str,
)
def test_gradients_keep_the_contract(shape: Sequence[int], masked: str, kind: tuple[torch.dtype, float]) -> None:
    (queries, keys), (dtype, spread) = shape[2:4], kind
    if masked == "causal" and queries != keys:
        queries = keys
        shape = (*shape[:2], queries, keys, shape[4])
    drawn = operands(shape, dtype, spread)
    masks = {
        "causal": torch.full((queries, keys), -math.inf).triu(1),
        "added": torch.randn(shape[0], 1, queries, keys),
        "of keys": torch.randn(1, 1, 1, keys).masked_fill(torch.arange(keys) > keys // 2, -math.inf),
    }
    mask = masks.get(masked)
    results = ours(drawn, masked == "causal", None if masked == "causal" else mask)
    eager = written_out(drawn, None if mask is None else mask.to(dtype))
    truth = written_out([x.double() for x in drawn], None if mask is None else mask.double())
    for name, result, other, true in zip("qkv", results, eager, truth, strict=True):
        verified = compare(result, other, true, direction="bwd", tensor=name)
        assert verified.ok, verified


def test_results_lie_in_memory_as_pytorch_lays_them_out() -> None:
    grad, q, k, v = drawn = operands((2, 3, 19, 11, 8), torch.bfloat16, 1.0)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    theirs = OPERATOR(grad, q, k, v, out, lse, 0.0, False)
    for mine, other in zip(ours(drawn), theirs, strict=True):
        assert (mine.stride(), mine.dtype, mine.shape) == (other.stride(), other.dtype, other.shape)


def test_operands_may_be_expanded_and_transposed() -> None:
    grad, q, k, v = operands((2, 3, 19, 11, 8), torch.float32, 1.0)
    one = torch.randn(2, 3, 8, 1).mT  # [2, 3, 1, 8], whose only row has no stride of its own
    strange = [
        [grad[:, :, :1].expand_as(grad), q.mT.contiguous().mT, k[:1].expand_as(k), v[:, :, :, :1].expand_as(v)],
        [grad, q, one, one],
    ]
    for given in strange:
        for mine, same in zip(ours(given), ours([x.contiguous().clone() for x in given]), strict=True):
            assert torch.equal(mine, same)


@pytest.mark.parametrize("heads", [1, 2, 6])
def test_heads_of_queries_that_share_keys(heads: int) -> None:
    grad, q, k, v = operands((2, 6, 9, 11, 8), torch.float32, 1.0)
    mask = torch.randn(2, 6, 9, 11)
    grouped = [grad, q, k[:, :heads], v[:, :heads]]
    dq, dk, dv = ours(grouped, mask=mask)
    written = [grad, q, *(x[:, :heads].repeat_interleave(6 // heads, 1) for x in (k, v))]
    true = written_out([x.double() for x in written], mask.double())
    shared = [x.unflatten(1, (heads, -1)).sum(2) for x in true[1:]]
    for mine, other in zip((dq, dk, dv), (true[0], *shared), strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-5)


def test_a_query_without_keys_takes_no_part() -> None:
    grad, q, k, v = drawn = operands((1, 1, 6, 5, 4), torch.float32, 1.0)
    mask = torch.zeros(6, 5)
    mask[2] = -math.inf
    results = ours(drawn, mask=mask)
    seen = [0, 1, 3, 4, 5]
    rest = ours([grad[:, :, seen], q[:, :, seen], k, v])
    assert results[0][0, 0, 2].count_nonzero() == 0
    assert torch.allclose(results[0][:, :, seen], rest[0], rtol=1e-6, atol=1e-7)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(results[1:], rest[1:], strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_spread_as_in_eager(value: float) -> None:
    drawn = operands((1, 2, 9, 9, 4), torch.float32, 1.0)
    drawn[1][0, 1, 4, 2] = value
    for mine, other in zip(ours(drawn), written_out(drawn), strict=True):
        assert torch.equal(mine.isnan(), other.isnan())


def test_float64_is_left_to_pytorch() -> None:
    drawn = operands((1, 2, 9, 9, 4), torch.float64, 1.0)
    for mine, true in zip(ours(drawn), written_out(drawn), strict=True):
        assert mine.dtype is torch.float64
        assert torch.allclose(mine, true, rtol=1e-12, atol=1e-13)


def test_a_compiled_program_runs_it() -> None:
    """Peaked rows, in fp32: the gradients that PyTorch's own backward misses the contract with."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(8), -1) @ v

    inputs = [x.requires_grad_() for x in operands((2, 3, 19, 19, 8), torch.float32, 3.0)[1:]]
    with recording() as record:
        compiled = torch.compile(attention, backend=backend, fullgraph=True)
        rows = verify(attention, compiled, inputs)
    assert record.fallbacks == [] and [d.verdict for d in record.decisions][:1] == ["taken"]
    assert [row for row in rows if not row.ok] == []
