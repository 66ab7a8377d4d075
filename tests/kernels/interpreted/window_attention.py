"""Attention within windows in Triton's interpreter."""

import pytest
import torch

from tests.gpu.kernels.launching import in_turn
from tests.kernels.attention.windows import CALLS, Windows, inputs, judged
from tilewright.functional import window_attention
from tilewright.kernels.attention.window import triton

CPU = torch.device("cpu")


@pytest.mark.parametrize(("call", "parts"), in_turn([(call,) for call in CALLS], [(1, 132)]), ids=str)
def test_the_numbers_contract(call: Windows, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # One program takes all windows of a mask, or each program one.
    monkeypatch.setattr(triton, "WAVES", parts)
    assert [row for row in judged(call, CPU) if not row.ok] == []


def test_a_row_without_any_key_is_nan_as_in_eager() -> None:
    q, k, v, _ = (x if x is None else x.detach() for x in inputs(Windows(masks=0), CPU))
    mask = torch.zeros(2, 1, 49, 49)
    mask[1, 0, 5] = -torch.inf
    out = window_attention(q, k, v, mask)
    assert out[1::2, :, 5].isnan().all()
    assert not out[::2].isnan().any()
    assert out.isnan().sum() == out[1::2, :, 5].numel()


def test_results_lie_as_their_operands() -> None:
    q, k, v, mask = inputs(Windows(), CPU)
    out = window_attention(q, k, v, mask)
    assert out.transpose(1, 2).is_contiguous()
    for x, gradient in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert gradient.transpose(1, 2).is_contiguous(), x.stride()


def test_the_operators_are_registered_well() -> None:
    given = (*inputs(Windows(), CPU), 0.25)
    torch.library.opcheck(torch.ops.tilewright.window_attention.default, given)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in given]
    dout = torch.randn(6, 2, 49, 32, dtype=torch.bfloat16)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.tilewright.window_attention_backward.default, (dout, *plain, True), test_utils=tests
    )
