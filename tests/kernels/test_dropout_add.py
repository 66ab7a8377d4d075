"""dropout_add without a GPU, beside `test_rows.py`: PyTorch's draws, and how the generator is numbered."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from tests.kernels import philox
from tilewright.kernels.activation import formula
from tilewright.kernels.dropout_add import dropout_add, generator


@pytest.mark.parametrize("p", [0.0, 0.4, 1.0])
def test_the_generator_advances_as_eagers(p: float) -> None:
    x, residual = torch.randn(2, 33, 10)
    states, results = [], []
    for call in (lambda: dropout_add(x, residual, p), lambda: F.dropout(x, p) + residual):
        torch.manual_seed(7)
        results.append(call())
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert torch.equal(results[0] == residual, results[1] == residual)


@pytest.mark.parametrize("kind", ["none", "silu"])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_mask_is_eagers_where_a_dimension_repeats(dim: int, kind: str) -> None:
    drawn = torch.rand(5, 6, 7).select(dim, 0).unsqueeze(dim) + 1.0
    for x in (drawn.expand(5, 6, 7), drawn.mT.expand(5, 7, 6) if dim == 0 else drawn.expand(5, 6, 7).transpose(0, 2)):
        residual, kept = torch.zeros(x.shape), []
        for call in (lambda x, r: dropout_add(x, r, 0.5, activation=kind), lambda x, r: F.dropout(formula(x, kind))):
            torch.manual_seed(7)
            kept.append(call(x, residual) != 0)
        assert torch.equal(*kept)


def test_nothing_is_dropped_outside_of_training() -> None:
    x, residual = torch.randn(2, 33)
    assert torch.equal(dropout_add(x, residual, 0.9, activation="gelu", training=False), F.gelu(x) + residual)


def test_layouts_are_kept_where_dense() -> None:
    x = torch.randn(4, 6).t()
    assert dropout_add(x, torch.randn(6, 4)).stride() == x.stride()
    assert dropout_add(torch.randn(6, 8)[:, ::2], torch.randn(6, 4)).is_contiguous()


def test_tensors_without_an_address_of_their_own() -> None:
    x, residual = torch.randn(3, 6, 4), torch.randn(3, 6, 4)

    def call(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return dropout_add(x, residual, training=False)

    assert torch.equal(torch.vmap(call)(x, residual), x + residual)
    assert torch.equal(torch.func.functionalize(call)(x, residual), x + residual)
    traced = make_fx(call, tracing_mode="fake")(x, residual)
    assert torch.equal(traced(x, residual), x + residual)


def test_philox_answers_as_its_authors_published() -> None:
    """The known answers of Random123 for the independent generator of these tests."""
    zero = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox.philox((0, 0, 0, 0), (0, 0)) == zero
    assert philox.philox((philox.WORD,) * 4, (philox.WORD,) * 2) == ones


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.37, 0.5, 0.9, 1 - 1e-9])
def test_the_threshold_parts_kept_from_dropped(p: float) -> None:
    edge = generator.threshold(p)
    words = {0, 1, 2**32 - 1, *range(max(edge - 300, 0), min(edge + 300, 2**32))}
    assert [word for word in words if philox.keeps(word, p) != (word < edge)] == []


def test_formulas_name_every_activation() -> None:
    x = torch.randn(9)
    wanted = {"none": x, "gelu": F.gelu(x), "gelu_tanh": F.gelu(x, approximate="tanh"), "silu": F.silu(x)}
    assert all(torch.equal(formula(x, kind), value) for kind, value in wanted.items())
