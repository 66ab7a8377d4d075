"""Cross entropy on a GPU, beside `test_rows.py`: its options, numbers of rows, and labels that are no column."""

import itertools

import pytest
import torch

from tests.gpu.kernels.launching import in_turn
from tests.kernels.losses import OPTIONS, targets, wrong_losses
from tests.kernels.row_operators import layout
from tilewright.kernels.cross_entropy import by_impl

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
IMPLS = ("triton", "cuda")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("case", "options", "dtype"), in_turn(itertools.product(["5x1", "7x33", "3x1031"], OPTIONS)), ids=str
)
def test_options(impl: str, case: str, options: str, dtype: torch.dtype) -> None:
    assert wrong_losses(layout(case, dtype, GPU), OPTIONS[options], impl) == []


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 257, 40000, 2**20 + 5])
def test_every_number_of_rows(rows: int) -> None:
    """Short rows: the lanes that share a row finish as many rows together as there are such lanes."""
    logits = torch.randn(rows, 128, device=GPU, generator=torch.Generator(GPU).manual_seed(rows))
    target = torch.randint(128, (rows,), device=GPU)
    target[3::5] = -100
    wanted = torch.nn.functional.cross_entropy(logits.double(), target, reduction="none")
    losses = by_impl(logits, target, reduction="none", impl="cuda")
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-6, atol=1e-6)
    mean = torch.nn.functional.cross_entropy(logits.double(), target)
    torch.testing.assert_close(by_impl(logits, target, impl="cuda").double(), mean, rtol=1e-6, atol=0)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_label_that_is_no_column_makes_its_row_nan(impl: str) -> None:
    logits = torch.randn(5, 300, device=GPU, requires_grad=True)
    target = targets(logits)
    target[1] = 300
    losses = by_impl(logits, target, reduction="none", impl=impl)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert losses.isnan().tolist() == [False, True, False, False, False]
    assert gradient.isnan().all(1).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(2**21 + 3, 1024), (2**14 + 1, 131072)], ids=str)
def test_past_32_bits(impl: str, shape: tuple[int, int]) -> None:
    """Rows beyond the elements that 32 bits can count."""
    logits = torch.randn(shape, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(shape[1], shape[:1], device=GPU)
    losses = by_impl(logits, target, reduction="none", impl=impl)
    last = logits.detach()[-5:].float().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(last, target[-5:], reduction="none")
    torch.testing.assert_close(losses[-5:].float(), wanted, rtol=2**-8, atol=0)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    (true,) = torch.autograd.grad(wanted.sum(), last)
    torch.testing.assert_close(gradient[-5:].float(), true, rtol=2**-7, atol=1e-7)
