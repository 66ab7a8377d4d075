"""dropout_add's generated kernels against the mask written out in Python, in Triton's interpreter."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kernels import philox
from tests.kernels.row_operators import layouts
from tilewright.bench.suites.dropout_add import masked
from tilewright.kernels import dropout_add
from tilewright.kernels.activation import formula, formula_backward
from tilewright.kernels.dropout_add import generator
from tilewright.launch import twin
from tilewright.launch.builder import RecipeBuilder, operands_of
from tilewright.measure.truth.contract import compare

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


class Generator:
    """PyTorch's of a GPU, as far as a recipe uses it."""

    offset = 0

    def initial_seed(self) -> int:
        return SEED

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Generator]:
    """The generator of a GPU of `BLOCKS` blocks."""
    made = Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", [made])
    monkeypatch.setattr(generator, "geometry_on", lambda device, *sizes: generator.geometry(*sizes, BLOCKS))
    monkeypatch.setattr(dropout_add, "_drawn_again", lambda x: True)
    yield made


def run(recipe: Any, *arguments: Any) -> list[torch.Tensor]:
    """The results of the recipe for these arguments."""
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    rest = iter(operands_of(tensors))
    known = [next(rest) if isinstance(x, torch.Tensor) else x for x in arguments]
    call = RecipeBuilder("dropout_add", operands_of(tensors), compiled=False)
    return list(twin.perform(recipe(call, *known), tensors))


def forward(*arguments: Any) -> list[torch.Tensor]:
    return run(dropout_add._recipe, *arguments)


def backward(*arguments: Any) -> torch.Tensor:
    return run(dropout_add._backward_recipe, *arguments)[0]


@pytest.mark.parametrize(("count", "dtype", "alignment"), CASES, ids=str)
def test_masks_are_pytorchs(drawn: Generator, count: int, dtype: torch.dtype, alignment: int) -> None:
    dealt = generator.geometry(count, dtype.itemsize, alignment, BLOCKS)
    assert dealt.vector == philox.vector_of(count, dtype.itemsize, alignment)
    ones, options = torch.ones(count, dtype=dtype), (P, "none", alignment)
    for offset in OFFSETS:
        wanted = philox.mask(count, dealt.vector, P, SEED, offset, BLOCKS)
        drawn.offset = offset
        out, state = forward(ones, torch.zeros_like(ones), *options)
        assert torch.equal(out != 0, wanted)
        assert state.tolist() == [signed(SEED), offset] and drawn.offset == offset + dealt.advance
        assert torch.equal(backward(ones, None, state, *options) != 0, wanted)
        (captured,) = forward(ones, torch.zeros_like(ones), *options, state)
        assert torch.equal(captured, out) and drawn.offset == offset + dealt.advance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["none", "gelu", "gelu_tanh", "silu"])
def test_both_directions_keep_the_contract(kind: str, dtype: torch.dtype) -> None:
    x, residual, dout = (layouts(41, 52, dtype, seed=seed)["strided"] for seed in range(3))
    dealt = generator.geometry(x.numel(), x.itemsize, 16, BLOCKS)
    mask = philox.mask(x.numel(), dealt.vector, P, SEED, 0, BLOCKS).view(x.shape)
    out, state = forward(x, residual, P, kind, 16)
    eager = formula(x, kind) * (mask.to(dtype) / (1 - P)) + residual
    truth = masked(x.double(), residual.double(), P, kind, mask)
    assert compare(out, eager, truth).ok
    dx = backward(dout, None if kind == "none" else x, state, P, kind, 16)
    wide = x.double().requires_grad_()
    (true,) = torch.autograd.grad(masked(wide, residual, P, kind, mask), wide, dout.double())
    assert compare(dx, formula_backward(dout * (mask.to(dtype) / (1 - P)), x, kind), true).ok


@pytest.mark.parametrize(("p", "factor"), [(0.0, 1.0), (1.0, 0.0)])
def test_certain_outcomes_draw_nothing(drawn: Generator, p: float, factor: float) -> None:
    x, residual = torch.randn(2, 1000)
    out, state = forward(x, residual, p, "none", 16)
    assert torch.equal(out, x * factor + residual) and drawn.offset == 0
    assert torch.equal(backward(x, None, state, p, "none", 16), x * factor)


def test_a_dropped_infinity_is_nan_as_in_eager() -> None:
    x = torch.full((64,), float("inf"))
    mask = philox.mask(64, generator.geometry(64, 4, 16, BLOCKS).vector, 0.5, SEED, 0, BLOCKS)
    out, _ = forward(x, torch.zeros(64), 0.5, "none", 16)
    assert torch.equal(out.isnan(), ~mask)
    assert torch.equal(out.isinf(), mask)


def test_no_elements() -> None:
    out, state = forward(torch.empty(0, 3), torch.empty(0, 3), P, "gelu", 16)
    assert out.shape == (0, 3) and state.tolist() == [0, 0]
    assert backward(out, out, state, P, "gelu", 16).shape == (0, 3)
