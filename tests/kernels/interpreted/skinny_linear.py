"""Products of few rows in Triton's interpreter, against float64 and PyTorch's operators."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.interpreter import install
from tilewright.kernels import skinny_linear as kernels
from tilewright.measure.truth.contract import compare

install()
EPS = 1e-6


def product(
    x: Tensor, gain: Tensor | None, weights: list[Tensor | None], bias: Tensor, residual: Tensor, gated: bool
) -> list[Tensor]:
    """The formula in PyTorch's operators, each rounded to the operands' dtype."""
    if gain is not None:
        x = F.rms_norm(x, x.shape[1:], gain, EPS)
    results = [F.linear(x, w) for w in weights if w is not None]
    results[0] = results[0] + bias
    if gated:
        results = [F.silu(results[0]) * results[1]]
    return [results[0] + residual, *results[1:]]


CASES = [
    # rows, columns, outputs, gated
    (1, 256, (24, 16, 8), False),
    (1, 2056, (13,), False),
    (1, 264, (9, 9), True),
    (1, 8, (1,), False),
    (2, 512, (40, 24, 16), False),
    (16, 1032, (40, 40), True),
    (33, 2048, (72,), False),
    (64, 136, (17, 1), False),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "columns", "outputs", "gated"), CASES, ids=str)
def test_the_contract_is_kept(
    rows: int, columns: int, outputs: tuple[int, ...], gated: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    wide = torch.randn(rows, columns + 8, dtype=dtype)
    x, gain = wide[:, :columns], torch.randn(columns, dtype=dtype) if rows == 1 else None
    weights: list[Tensor | None] = [torch.randn(n, columns, dtype=dtype) / columns**0.5 for n in outputs]
    weights += [None] * (3 - len(weights))
    bias, residual = torch.randn(outputs[0], dtype=dtype), torch.randn(rows, 2 * outputs[0], dtype=dtype)[:, ::2]
    residual = residual.contiguous()
    zeros = torch.zeros(64, dtype=torch.int32)
    given = (x, gain, EPS, *weights, bias, None, None, residual, "swiglu" if gated else "none", zeros)
    assert kernels.refusal(x, [w for w in weights if w is not None]) is None
    found = [y for y in kernels.skinny_linear(*given) if y.numel()]
    eager = product(x, gain, weights, bias, residual, gated)
    doubled = [None if w is None else w.double() for w in weights]
    gain64 = None if gain is None else gain.double()
    exact = product(x.double(), gain64, doubled, bias.double(), residual.double(), gated)
    assert len(found) == len(exact)
    for mine, theirs, true in zip(found, eager, exact, strict=True):
        assert compare(mine, theirs, true).ok
    assert not zeros.any()


def test_splits_of_the_columns_are_taken_where_there_are_few_blocks() -> None:
    assert kernels.plan(32, 8192, [2048], False, 132).splits == 8
    assert kernels.plan(32, 2048, [32000], False, 132).splits == 1
    assert kernels.plan(1, 8192, [64], False, 132).splits == 1


def test_what_the_kernel_does_not_take() -> None:
    x, w = torch.zeros(1, 16, dtype=torch.bfloat16), torch.zeros(4, 16, dtype=torch.bfloat16)
    assert kernels.refusal(x, [w]) is None
    assert "bf16 and fp16" in str(kernels.refusal(x.float(), [w.float()]))
    assert "1 to 64 rows" in str(kernels.refusal(x.expand(65, 16), [w]))
    assert "multiples of 16 bytes" in str(kernels.refusal(x[:, 1:], [w[:, 1:]]))
    assert "multiples of 16 bytes" in str(kernels.refusal(x, [w.t().contiguous().t()]))
