"""The product of fp32 by 16-bit matrix instructions on a GPU: the contract, special values, launches."""

import itertools

import pytest
import torch
from torch import nn

from tests.contract import keeps_contract, own
from tilewright.kernels.product import by_library, cuda, product

GPU = torch.device("cuda:0")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability(GPU) == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="the kernel is for compute capability 9.0")]
SHAPES = [
    (1, 4, 4), (8, 8, 4), (132, 260, 100), (128, 128, 32), (256, 384, 512), (1004, 1000, 1024), (4, 4096, 256),
    (128, 128, 16384), (640, 3072, 2048), (2176, 1000, 96), (1540, 1540, 1540),
]  # fmt: skip
"""M, N, K: one tile, tails in each direction, shares of few tiles and of some of many, whole waves."""
LAYOUTS = list(itertools.product((False, True), repeat=2))


def operand(shape: tuple[int, ...], transposed: bool, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator(GPU).manual_seed(sum(shape))
    lies = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
    made = torch.randn(lies, device=GPU, generator=generator) * scale
    return made.mT if transposed else made


def errors(ours: torch.Tensor, theirs: torch.Tensor, true: torch.Tensor) -> tuple[float, float]:
    """Root mean square errors relative to the truth's."""
    size = true.square().mean().sqrt()
    first, second = (((one.double() - true).square().mean().sqrt() / size).item() for one in (ours, theirs))
    return first, second


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_it_is_as_precise_as_the_librarys(
    sizes: tuple[int, int, int], batch: tuple[int, ...], layouts: tuple[bool, bool]
) -> None:
    m, n, k = sizes
    left, right = operand((*batch, m, k), layouts[0]), operand((*batch, k, n), layouts[1])
    assert cuda.refuses(left, right) is None
    for bias in (None, operand((n, 1), False)[:, 0]):
        true = left.double() @ right.double() + (0.0 if bias is None else bias.double())
        ours, theirs = errors(product(left, right, bias), by_library(left, right, bias), true)
        assert ours <= max(1.25 * theirs, 2.0**-23)


@pytest.mark.parametrize("sizes", [(1001, 1003, 1025), (130, 7, 999), (33, 4097, 2050)], ids=str)
def test_lines_at_no_multiple_of_16_bytes_are_copied(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    whole = operand((m * k + 1, 1), False)[:, 0]
    for left in (
        operand((m, k), False),
        operand((m, k), True),
        whole[1:].view(m, k),
        operand((1, k), False).expand(m, k),
    ):
        right = operand((k, n), True)
        true = left.double() @ right.double()
        ours, theirs = errors(product(left, right, None), by_library(left, right, None), true)
        assert ours <= max(1.25 * theirs, 2.0**-23)


@pytest.mark.parametrize("distribution", ["positive", "cancelling", "large and small"])
def test_hard_sums(distribution: str) -> None:
    left, right = operand((512, 4096), False), operand((4096, 512), False)
    if distribution == "positive":
        left, right = left.abs(), right.abs()
    elif distribution == "cancelling":
        left[:, 2048:], right[2048:] = left[:, :2048], -right[:2048] * (1 + 2.0**-10)
    else:
        left *= 10.0 ** torch.randint(-6, 7, left.shape, device=GPU)
    true = left.double() @ right.double()
    ours, theirs = errors(product(left, right, None), by_library(left, right, None), true)
    assert ours <= max(1.25 * theirs, 2.0**-23)


def test_values_that_are_not_finite() -> None:
    """Infinities and NaN where the library has them, in whole tiles and in shares; what fits in fp32 stays finite."""
    for k in (256, 8192):
        left, right = operand((300, k), False), operand((k, 260), False)
        left[3, 5], left[7, 9], left[40, 1], left[100, 4], right[6, 250] = (
            torch.inf,
            3.4e38,
            1e38,
            torch.nan,
            -torch.inf,
        )
        right[:, 1], right[:, 2] = 0.5, 0.0
        right[1, 3] = 1e-30
        ours, theirs = product(left, right, None), by_library(left, right, None)
        for kind in (torch.isnan, torch.isinf, torch.isfinite):
            assert torch.equal(kind(ours), kind(theirs)), kind.__name__
        same = torch.isfinite(theirs)
        torch.testing.assert_close(ours[same], theirs[same], rtol=1e-4, atol=2.0**-22 * k)


def test_every_element_is_written_and_runs_are_alike() -> None:
    left, right = operand((1000, 2048), False), operand((900, 2048), False).t()
    found = []
    for _ in range(10):
        garbage = torch.full((1000, 900), torch.nan, device=GPU)
        del garbage
        found.append(product(left, right, None))
    assert all(torch.equal(found[0], one) for one in found[1:])


@pytest.mark.parametrize(("m", "n", "k"), [(32768, 32768, 32), (32768, 16384, 64), (8192, 8192, 2048)])
def test_no_slot_is_overwritten_while_it_is_read(m: int, n: int, k: int) -> None:
    """Many tiles of few steps: a slot that is free too early shows as whole wrong rows of a tile."""
    left, right = torch.rand(m, k, device=GPU), torch.rand(k, n, device=GPU)
    true = by_library(left, right, None)
    for _ in range(10):
        wrong = product(left, right, None).sub_(true).abs_().amax()
        assert wrong <= 2.0**-18 * k


@pytest.mark.parametrize("training", [False, True])
def test_a_compiled_program_multiplies_with_it(training: bool) -> None:
    x = torch.randn(4096, 2048, device=GPU, requires_grad=training)
    net = nn.Sequential(nn.Linear(2048, 4096), nn.GELU(), nn.Linear(4096, 2048)).to(GPU)
    assert "product" in own(keeps_contract(net, [x], training=training))


def test_a_batch_of_products_in_a_compiled_program() -> None:
    left, right = operand((32, 1024, 512), False), operand((32, 512, 1024), True)
    assert "product" in own(keeps_contract(lambda x, y: (x @ y).relu(), [left, right], training=False))
