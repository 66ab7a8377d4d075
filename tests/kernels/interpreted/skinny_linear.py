"""Products of few rows in Triton's interpreter, against float64 and PyTorch's operators."""

import pytest
import torch

from tests.gpu.kernels.launching import in_turn
from tests.kernels.few_rows import keeps_contract
from tilewright.kernels import skinny_linear as kernels

CASES = [
    # rows, columns, outputs, activation
    (1, 256, (24, 16, 8), "none"),
    (1, 2056, (13,), "gelu"),
    (1, 264, (9, 9), "swiglu"),
    (1, 8, (1,), "silu"),
    (2, 512, (40, 24, 16), "none"),
    (16, 1032, (40, 40), "swiglu"),
    (33, 2048, (72,), "gelu_tanh"),
    (64, 136, (17, 1), "none"),
]


@pytest.mark.parametrize(
    ("rows", "columns", "outputs", "activation", "dtype"), in_turn(CASES, [(torch.bfloat16, torch.float16)]), ids=str
)
def test_the_contract_is_kept(
    rows: int, columns: int, outputs: tuple[int, ...], activation: str, dtype: torch.dtype
) -> None:
    keeps_contract(rows, columns, outputs, activation, dtype, "cpu")


def test_what_the_kernel_does_not_take() -> None:
    x, w = torch.zeros(1, 16, dtype=torch.bfloat16), torch.zeros(4, 16, dtype=torch.bfloat16)
    assert kernels.refusal(x, [w]) is None
    assert "bf16 and fp16" in str(kernels.refusal(x.float(), [w.float()]))
    assert "1 to 64 rows" in str(kernels.refusal(x.expand(65, 16), [w]))
    assert "multiples of 16 bytes" in str(kernels.refusal(x[:, 1:], [w[:, 1:]]))
    assert "multiples of 16 bytes" in str(kernels.refusal(x, [w.t().contiguous().t()]))
