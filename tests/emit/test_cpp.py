"""Masks that become numbers in C++ kernels: the numbers, and a loop that the compiler vectorises."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.backend.compiling import compiled
from tests.emit.stored_values import DTYPES, FLOAT8, SOURCES, conversions, differing, same
from tests.emit.triton_programs import nests_of
from tests.gpu.kernels.launching import in_turn
from tilewright.backend import backend, recording


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bfloat16])
def test_a_mask_is_chosen_and_not_converted(dtype: torch.dtype) -> None:
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))

    def counted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = (x > 0.5).to(dtype)
        return mask * 3, (x < 0).sum(1)

    with recording() as record:
        found = compiled(counted)(x)
    for mine, theirs in zip(found, counted(x), strict=True):
        assert torch.equal(mine, theirs)
    (graph,) = record.graphs
    assert any(" ? 1 : 0;" in source for source in graph.plan.sources.values())


CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "primes": (lambda x: x.t().contiguous() * 2 + 1, (67, 131)),
    "one row left": (lambda x: x.t().contiguous() * 2, (17, 65)),
    "less than a tile": (lambda x: x.t().contiguous() * 2, (5, 7)),
    "beside its transpose": (lambda x: x.t() + x, (129, 129)),
    "channels last": (lambda x: x.permute(0, 2, 3, 1).contiguous() * 2, (3, 5, 9, 31)),
    "heads": (lambda x: x.transpose(1, 2).contiguous().exp(), (2, 65, 3, 4)),
    "by a number for each row": (lambda x: x.t().contiguous() * x[0, :, None], (40, 70)),
}


@pytest.mark.parametrize(("name", "dtype"), in_turn(CASES, [(torch.float32, torch.bfloat16, torch.int64)]), ids=str)
def test_each_element_is_visited_once(name: str, dtype: torch.dtype) -> None:
    function, shape = CASES[name]
    x = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    with recording() as record:
        result = compiled(function)(x)
    torch.testing.assert_close(result, function(x))
    (source,) = (source for graph in record.graphs for source in graph.plan.sources.values())
    assert ("tile_end" in source) == (name != "heads")


def test_a_value_beside_sums_of_columns_is_written_in_each_row() -> None:
    """The sums read it once more, after all rows."""

    def results(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.full_like(x, 3), y.exp().expand(x.shape).clone(), x.sum(0) * 3 + y.exp()

    x, y = torch.randn(9, 7, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 7)
    torch.testing.assert_close(compiled(results)(x, y), results(x, y))


@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_conversions_are_eagers(dtype: torch.dtype, source: torch.dtype) -> None:
    for function, x in conversions(dtype, source):
        assert len(nests_of(function, x)) == 1
        assert same(torch.compile(function, backend=backend)(x), function(x))


def test_a_scaled_product_of_floats_of_8_bits() -> None:
    """Quantised in kernels, with the gradient of what is not quantised; the product is PyTorch's."""

    def quantised(x: torch.Tensor) -> torch.Tensor:
        scale = 448 / x.detach().abs().amax().clamp(min=1e-5)
        rounded = (x.detach() * scale).to(torch.float8_e4m3fn).float() / scale
        return x + (rounded - x).detach()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return quantised(x) @ quantised(w).T

    inputs = [torch.randn(n, 64, requires_grad=True) for n in (48, 32)]
    with torch.no_grad():
        compiled = torch.compile(function, backend=backend)
    y, expected = compiled(*inputs), function(*inputs)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_conversion_reads_what_is_stored(dtype: torch.dtype) -> None:
    assert differing(dtype) == []


@pytest.mark.parametrize(("count", "narrow"), [(40_000, True), (50_000, False)])
def test_positions_are_computed_in_32_bits_where_they_fit(count: int, narrow: bool) -> None:
    def program(x: Tensor) -> Tensor:
        i = torch.arange(count)
        return x + i * i - torch.minimum(i, x)

    x = torch.randint(-(2**40), 2**40, (count,))
    with torch.no_grad(), recording() as record:
        assert torch.equal(compiled(program)(x), program(x))
    (source,) = (source for graph in record.graphs for source in graph.plan.sources.values())
    assert bool(re.search(r"\(uint32_t\)(v\d+) \* \(uint32_t\)\1\b", source)) == narrow


LOOKUPS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, t: t.gather(-1, (x > 0).long()),
    lambda x, t: t.gather(-1, (x > 0).long() % 5),
    lambda x, t: t.gather(-1, torch.where(x > 1, 1, 0)),
    lambda x, t: F.embedding((x > 0).int(), t).sum(-1),
]


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_an_index_that_is_a_comparison_is_0_or_1(lookup: Callable[[Tensor, Tensor], Tensor]) -> None:
    """In a vector, g++ 12 takes it for 0 or -1, and reads before the row."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(17, 67, generator=generator) for _ in range(2)]
    torch.testing.assert_close(compiled(lookup)(*given), lookup(*given))
