"""dropout_add's Triton kernels against the mask written out in Python, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import philox
from tests.kernels.interpreter import install
from tests.kernels.layouts import layouts
from tilewright.kernels.activation import formula, formula_backward
from tilewright.kernels.dropout_add import generator, launch, reference
from tilewright.measure.truth.contract import compare

install()
SEED = 0x9234_5678_9ABC_DEF0
P = 0.37
BLOCKS = 2
"""Few, so that a small tensor takes several steps."""
OFFSETS = (12, 4 * (2**32 - 1))


def signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed


CASES = [
    (1, torch.bfloat16, 16), (10, torch.float32, 16), (1001, torch.bfloat16, 16), (2049, torch.float32, 16),
    (1034, torch.float16, 16), (1028, torch.bfloat16, 16), (4104, torch.bfloat16, 16), (2052, torch.float32, 16),
    (520, torch.bfloat16, 8), (520, torch.bfloat16, 4), (520, torch.bfloat16, 2), (520, torch.float32, 4),
]  # fmt: skip
"""Elements, dtype, and the bytes that the input is aligned to: vectors of 1, 2, 4 and 8, one step and two."""


@pytest.mark.parametrize(("count", "dtype", "alignment"), CASES, ids=str)
def test_masks_are_pytorchs(count: int, dtype: torch.dtype, alignment: int) -> None:
    dealt = generator.geometry(count, dtype.itemsize, alignment, BLOCKS)
    assert dealt.vector == philox.vector_of(count, dtype.itemsize, alignment)
    ones, state = torch.ones(count, dtype=dtype), torch.empty(2, dtype=torch.int64)
    for offset in OFFSETS:
        wanted = philox.mask(count, dealt.vector, P, SEED, offset, BLOCKS)
        begins = signed(SEED), offset
        out = launch.forward(ones, torch.zeros_like(ones), P, "none", dealt, state, begins)
        assert torch.equal(out != 0, wanted)
        assert state.tolist() == list(begins)
        assert torch.equal(launch.backward(ones, None, P, "none", dealt, state) != 0, wanted)
        captured = launch.forward(ones, torch.zeros_like(ones), P, "none", dealt, state, None)
        assert torch.equal(captured, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["none", "gelu", "gelu_tanh", "silu"])
def test_both_directions_keep_the_contract(kind: str, dtype: torch.dtype) -> None:
    x, residual, dout = (layouts(41, 52, dtype, seed=seed)["contiguous"] for seed in range(3))
    dealt = generator.geometry(x.numel(), x.itemsize, 16, BLOCKS)
    state = torch.empty(2, dtype=torch.int64)
    mask = philox.mask(x.numel(), dealt.vector, P, SEED, 0, BLOCKS).view(x.shape)
    out = launch.forward(x, residual, P, kind, dealt, state, (signed(SEED), 0))
    eager = formula(x, kind) * (mask.to(dtype) / (1 - P)) + residual
    truth = reference.dropout_add(x.double(), residual.double(), P, kind, mask)
    assert compare(out, eager, truth).ok
    dx = launch.backward(dout, None if kind == "none" else x, P, kind, dealt, state)
    wide = x.double().requires_grad_()
    (true,) = torch.autograd.grad(reference.dropout_add(wide, residual, P, kind, mask), wide, dout.double())
    assert compare(dx, formula_backward(dout * (mask.to(dtype) / (1 - P)), x, kind), true).ok


@pytest.mark.parametrize(("p", "factor"), [(0.0, 1.0), (1.0, 0.0)])
def test_certain_outcomes_draw_nothing(p: float, factor: float) -> None:
    x, residual = torch.randn(2, 1000)
    dealt = generator.geometry(1000, 4, 16, BLOCKS)
    state = torch.zeros(2, dtype=torch.int64)
    assert torch.equal(launch.forward(x, residual, p, "none", dealt, state, (0, 0)), x * factor + residual)
    assert torch.equal(launch.backward(x, None, p, "none", dealt, state), x * factor)


def test_a_dropped_infinity_is_nan_as_in_eager() -> None:
    x = torch.full((64,), float("inf"))
    dealt = generator.geometry(64, 4, 16, BLOCKS)
    out = launch.forward(x, torch.zeros(64), 0.5, "none", dealt, torch.empty(2, dtype=torch.int64), (1, 0))
    mask = philox.mask(64, dealt.vector, 0.5, 1, 0, BLOCKS)
    assert torch.equal(out.isnan(), ~mask)
    assert torch.equal(out.isinf(), mask)
