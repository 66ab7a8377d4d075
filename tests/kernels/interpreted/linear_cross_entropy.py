"""Linear and cross entropy with its Triton kernels, in Triton's interpreter."""

import pytest
import torch

from tests.contract import broken
from tests.gpu.kernels.launching import in_turn
from tests.kernels.vocabulary import OPTIONS, SUITE, Options, by_position, error_of_a_sure_row, inputs
from tilewright.kernels.cross_entropy import triton as kernels
from tilewright.operators.own import linear_cross_entropy as row


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of tokens, and several blocks of columns."""
    monkeypatch.setattr(row, "LOGITS_BYTES", 7 * 101 * 2)
    monkeypatch.setattr(kernels, "TILE", 64)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("options", "dtype"),
    in_turn([(options,) for options in OPTIONS], [(torch.float32, torch.bfloat16, torch.float16)]),
    ids=str,
)
def test_the_contract_is_kept(options: Options, dtype: torch.dtype) -> None:
    for sizes in ((23, 16, 101), (1, 1, 3)):
        assert broken(SUITE, (*inputs(*sizes, dtype), *options), by_position) == [], sizes


def test_the_z_loss_of_a_sure_row_is_not_rounded_away() -> None:
    assert error_of_a_sure_row() < 5e-7


@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_scale(factor: float) -> None:
    x = torch.randn(5000).half()
    expected = (x.float() * factor).half()
    torch.ops.tilewright.scale_gradient_(x, torch.tensor(factor))
    assert torch.equal(x, expected)
