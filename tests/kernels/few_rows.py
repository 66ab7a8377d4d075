"""Products of few rows against float64 and PyTorch's operators, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.kernels import skinny_linear
from tilewright.kernels.activation import formula
from tilewright.measure.truth.contract import compare

EPS = 1e-6


def keeps_contract(
    rows: int, columns: int, outputs: tuple[int, ...], activation: str, dtype: torch.dtype, device: str
) -> None:
    """Products of the same rows, with a bias, an activation and a residual, of one row with a norm, twice."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x, gain = drawn(rows, columns + 8)[:, :columns], drawn(columns) if rows == 1 else None
    weights = [drawn(n, columns) / columns**0.5 for n in outputs]
    bias, residual = drawn(outputs[0]), drawn(rows, outputs[0])
    zeros = torch.zeros(4096, dtype=torch.int32, device=device)

    def product(x: Tensor, *weights: Tensor) -> list[Tensor]:
        """The formula in PyTorch's operators, each rounded to the operands' dtype."""
        if gain is not None:
            x = F.rms_norm(x, x.shape[1:], gain.to(x.dtype), EPS)
        results = [F.linear(x, w) for w in weights]
        results[0] = results[0] + bias.to(x.dtype)
        if activation == "swiglu":
            results = [F.silu(results[0]) * results[1]]
        else:
            results[0] = formula(results[0], activation)
        return [results[0] + residual.to(x.dtype), *results[1:]]

    assert skinny_linear.refusal(x, weights) is None
    eager, exact = product(x, *weights), product(x.double(), *(w.double() for w in weights))
    padded = [*weights, *[None] * (3 - len(weights))]
    for _ in range(2):
        options = (bias, None, None, residual, activation, zeros)
        found = [y for y in skinny_linear.skinny_linear(x, gain, EPS, *padded, *options) if y.numel()]
        for mine, theirs, true in zip(found, eager, exact, strict=True):
            assert compare(mine, theirs, true).ok
        assert not zeros.any()
