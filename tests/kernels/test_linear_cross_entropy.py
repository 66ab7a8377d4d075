"""Linear and cross entropy without a GPU: formula, chunks, gradients, registration, machine code."""

import itertools

import pytest
import torch

from tests.contract import broken
from tests.gpu.kernels.launching import in_turn
from tests.kernels.vocabulary import OPTIONS, SUITE, Options, by_position, error_of_a_sure_row, inputs, of_all_logits
from tilewright.kernels.linear_cross_entropy import linear_cross_entropy
from tilewright.operators.own import linear_cross_entropy as row


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of some rows, so that gradients are summed over them."""
    monkeypatch.setattr(row, "LOGITS_BYTES", 7 * 101 * 4)


@pytest.mark.parametrize(
    ("sizes", "options", "dtype"),
    in_turn(itertools.product([(23, 16, 101), (1, 1, 3)], OPTIONS), [(torch.float32, torch.bfloat16, torch.float16)]),
    ids=str,
)
def test_the_contract_is_kept(sizes: tuple[int, int, int], options: Options, dtype: torch.dtype) -> None:
    assert broken(SUITE, (*inputs(*sizes, dtype), *options), by_position) == []


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_float64_stays_float64(options: Options) -> None:
    x, weight, target = inputs(23, 16, 101, torch.float64)
    found = []
    for function in (by_position, of_all_logits):
        loss = function(x, weight, target, *options)
        found.append([loss, *torch.autograd.grad(loss, (x, weight))])
    for ours, true in zip(*found, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-13, atol=1e-15)


def test_the_z_loss_of_a_sure_row_is_not_rounded_away() -> None:
    assert error_of_a_sure_row() < 5e-7


def test_only_a_chunk_of_logits_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    plain = torch.Tensor.new_empty

    def noted(tensor: torch.Tensor, *shape: int, **options: object) -> torch.Tensor:
        made.append(shape)
        return plain(tensor, *shape, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.Tensor, "new_empty", noted)
    linear_cross_entropy(*inputs(23, 16, 101, torch.float32))
    assert (7, 101) in made and not any(shape[0] > 7 for shape in made if len(shape) == 2)


@pytest.mark.parametrize("tokens", [0, 4])
def test_nothing_to_count(tokens: int) -> None:
    x, weight, _ = inputs(tokens, 5, 9, torch.float32)
    loss = linear_cross_entropy(x, weight, torch.full((tokens,), -100))
    assert loss.isnan()
    assert all(not gradient.any() for gradient in torch.autograd.grad(loss, (x, weight)))
    assert linear_cross_entropy(x, weight, torch.full((tokens,), -100), reduction="sum") == 0


@pytest.mark.parametrize("needed", [0, 1])
def test_a_gradient_of_one_alone(needed: int) -> None:
    x, weight, target = inputs(11, 5, 9, torch.float64)
    both = torch.autograd.grad(linear_cross_entropy(x, weight, target), (x, weight))
    arguments = [x.detach(), weight.detach()]
    arguments[needed].requires_grad_()
    (alone,) = torch.autograd.grad(linear_cross_entropy(*arguments, target), arguments[needed])
    torch.testing.assert_close(alone, both[needed])


def test_a_second_derivative_is_refused() -> None:
    x, weight, target = inputs(23, 16, 101, torch.float32)
    first = torch.autograd.grad(linear_cross_entropy(x, weight, target), (x, weight))
    made = torch.autograd.grad(linear_cross_entropy(x, weight, target), (x, weight), create_graph=True)
    for plain, one in zip(first, made, strict=True):
        torch.testing.assert_close(plain, one)
    with pytest.raises(NotImplementedError, match="linear_cross_entropy_backward has no second derivative"):
        made[0].square().sum().backward()


def test_a_second_backward_is_as_good_as_the_first() -> None:
    x, weight, target = inputs(11, 5, 9, torch.float64)
    loss = linear_cross_entropy(x, weight, target)
    first = torch.autograd.grad(3 * loss, (x, weight), retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    second = torch.autograd.grad(2 * loss, (x, weight))
    for one, before, other in zip(first, kept, second, strict=True):
        assert torch.equal(one, before)
        torch.testing.assert_close(one / 3, other / 2)


def test_any_leading_dimensions() -> None:
    x, weight, target = inputs(12, 5, 9, torch.float32)
    expected = linear_cross_entropy(x, weight, target)
    assert torch.equal(linear_cross_entropy(x.view(3, 4, 5), weight, target.view(3, 4)), expected)
    assert torch.equal(linear_cross_entropy(x.t().contiguous().t(), weight.t().contiguous().t(), target), expected)


def test_no_gradients_are_made_without_need() -> None:
    x, weight, target = inputs(4, 5, 9, torch.float32)
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, target)
    assert not loss.requires_grad
    operator = torch.ops.tilewright.linear_cross_entropy.default
    made = operator(x.detach(), weight.detach(), target, -100, 0.0, 0.0, True, [False, False])
    assert [tensor.numel() for tensor in made] == [1, 0, 0, 1]


def test_a_class_that_is_none_is_an_index_error() -> None:
    x, weight, target = inputs(4, 5, 9, torch.float32)
    with pytest.raises(IndexError):
        linear_cross_entropy(x, weight, target + 9)
