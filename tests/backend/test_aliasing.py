"""Views, writes and shared memory: what one tensor shows, every other view of it shows; results are their holder's."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.backend.compiling import agrees, assert_same, chain, compiled, with_grad
from tilewright.runtime.pool import pool

Inputs = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


OVERLAPS: list[Inputs] = [
    lambda base: (base[:8], base[1:9]),
    lambda base: (base[:8, :8], base[:8, :8].t()),
    lambda base: (base[:8], base.view(torch.int32)[:8]),
    lambda base: (base[:8], torch.from_numpy(base.numpy())[1:9]),
    lambda base: (base.view(-1).unfold(0, 16, 4)[:8], base[12:]),
    lambda base: (base[:8], base[:1].expand(8, 16)),
]


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(
    ("overlap", "first", "trained"),
    [
        *((overlap, 0, n % 2 == 0) for n, overlap in enumerate(OVERLAPS)),
        (OVERLAPS[0], 1, True),
        (OVERLAPS[2], 1, False),
    ],
)
def test_a_written_input_that_overlaps(
    overlap: Inputs, first: int, trained: bool, told: Callable[[], list[str]]
) -> None:
    """By whatever strides, dtype and storage, the program compiled for such inputs or for others."""

    def apart(base: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return overlap(base.clone())[0], overlap(base.clone())[1]

    def function(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = b * 2
        a.add_(1)
        return before, F.gelu(a * w), b * 3

    run = compiled(function, dynamic=False)
    for inputs in ([apart, overlap, apart], [overlap, apart, overlap])[first]:
        bases = [torch.arange(320.0).reshape(20, 16).cos() for _ in range(2)]
        w = torch.tensor(2.0, requires_grad=trained)
        assert_same(run(*inputs(bases[0]), w), function(*inputs(bases[1]), w))
        assert_same(*bases)
    assert len(told()) == 1


def test_views_of_results_and_of_inputs() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = F.gelu(x) * 2
        return h, h.t(), h[1:], x.view(-1), x.t()

    agrees(function, [with_grad(40, 20)], backward=True)


def test_a_view_shows_what_the_caller_writes_to_the_result() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.gelu(x) * 2 + 1
        return h, h.view(-1)

    run = compiled(function)
    x = torch.randn(40, 2000)
    result, view = run(x)
    result.add_(1)
    assert_same(result.view(-1), view)
    assert_same(run(x), function(x))


def test_a_view_of_an_input_shows_what_the_caller_writes() -> None:
    run = compiled(lambda x: (x[1:], F.gelu(x)))
    x = torch.randn(40, 20)
    view, _ = run(x)
    view.zero_()
    assert x[1:].abs().sum() == 0


@pytest.mark.parametrize("trained", [False, True])
def test_a_written_input(trained: bool) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return F.gelu(x) * w

    agrees(function, [torch.randn(40, 20), torch.randn(40, 20, requires_grad=trained)], backward=trained)


def test_a_written_input_that_is_no_leaf() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return F.gelu(x)

    def step(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
        inner = x * 1
        (run(inner) + inner).sum().backward()

    agrees(function, [with_grad(40, 20)], step)


def test_a_written_transpose_of_an_input() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.t().add_(x.sum())
        return F.gelu(x)

    agrees(function, [torch.randn(40, 20)])


def test_reads_before_and_after_a_write() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = F.gelu(x) * 2
        column = x.sum(0)
        x.copy_(before + 1)
        return before, column, x.sum(0), x * 2

    agrees(function, [torch.randn(40, 20)])


class Counting(nn.Module):
    """A running mean and a counter as buffers, as BatchNorm has them."""

    calls: torch.Tensor
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 20)
        self.norm = nn.BatchNorm1d(20)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return F.gelu(self.norm(self.linear(x))) * self.mean


@pytest.mark.parametrize("training", [False, True])
def test_buffers_that_each_call_writes(training: bool) -> None:
    agrees(Counting().train(training), [with_grad(40, 20)], backward=True)


def test_a_parameter_written_in_forward() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(20))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.mul_(2)
            return F.gelu(x * self.weight)

    agrees(Scaled(), [with_grad(40, 20)], backward=True)


def test_a_result_that_is_an_input() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, F.gelu(x), x

    x = torch.randn(40, 20)
    first, _, last = compiled(function)(x)
    assert first is x and last is x
    agrees(function, [with_grad(40, 20)], backward=True)


def test_one_result_twice_is_one_tensor_and_equal_results_are_two() -> None:
    def once(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.gelu(x) * 2
        return h, h

    def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.gelu(x) * 2, F.gelu(x) * 2

    x = torch.randn(300, 200)
    a, b = compiled(once)(x)
    assert a.data_ptr() == b.data_ptr()
    a, b = compiled(twice)(x)
    a.zero_()
    assert_same(b, F.gelu(x) * 2)
    agrees(once, [with_grad(40, 20)], backward=True)


def test_equal_results_seen_through_views_are_two_tensors() -> None:
    def copied(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.contiguous(), x.reshape(-1)

    def computed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (F.gelu(x) * 2).view(-1), (F.gelu(x) * 2).t()

    def of_several(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.max(0)[0], x.max(0)[0], torch.topk(x, 2)[0], torch.topk(x, 2)[0].t()

    for function in (copied, computed, of_several):
        x = torch.randn(8, 12)[::2, ::2]
        results = compiled(function)(x)
        for result in results:
            kept = [other.clone() for other in results if other is not result]
            result.zero_()
            assert_same([other for other in results if other is not result], kept)


def test_writing_to_a_constant_result_changes_no_later_call() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.tensor([1.0, 2.0, 3.0]), F.gelu(x), torch.tensor([4.0, 5.0]).view(2, 1)

    run = compiled(function)
    x = torch.randn(40, 20)
    for result in run(x):
        result.zero_()
    assert_same(run(x), function(x))


def test_storage_is_not_taken_over_while_an_unknown_view_shows_it() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x @ w
        pairs = torch.view_as_complex(h.view(-1, 2))
        k = F.gelu(h)
        return k.sum(), k @ w, (pairs * 1j).real

    agrees(function, [torch.randn(64, 64) / 8, torch.randn(64, 64) / 8])


LARGE = (1000, 300)  # 1.2 MB: comes from the pool


def test_structures_of_results() -> None:
    def function(x: torch.Tensor) -> dict[str, Any]:
        h = F.gelu(x)
        return {"a": h * 2, "b": (h, None, 3, [h.sum(), True]), "c": 1.5}

    agrees(function, [with_grad(40, 20)], backward=True)


def test_fifty_results_held_while_the_model_runs_on() -> None:
    run = compiled(chain)
    inputs = [torch.randn(LARGE) for _ in range(50)]
    results = [run(x) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        assert_same(result, chain(x))


def test_what_is_saved_for_backward_survives_other_calls() -> None:
    def step(run: Callable[[torch.Tensor], torch.Tensor], *leaves: torch.Tensor) -> None:
        for result in reversed([run(x) for x in leaves]):
            result.sum().backward()

    agrees(chain, [with_grad(*LARGE) for _ in range(12)], step)


def test_a_view_and_an_array_keep_the_memory_of_their_results() -> None:
    run = compiled(chain)
    x = torch.randn(LARGE)
    row, array = run(x)[7], run(x).numpy()
    for _ in range(5):
        run(torch.randn(LARGE))
    assert_same([row, torch.from_numpy(array)], [chain(x)[7], chain(x)])


def test_results_may_be_written_shared_saved_and_shrunk() -> None:
    run = compiled(chain)
    x = torch.randn(LARGE)
    expected = chain(x)
    run(x).fill_(-1)
    assert_same(run(x), expected)
    assert_same(run(x).share_memory_(), expected)
    file = io.BytesIO()
    torch.save(run(x), file)
    assert file.tell() < 1.1 * expected.nbytes
    file.seek(0)
    assert_same(torch.load(file), expected)
    assert_same(run(x).resize_(10, 300), expected[:10])
    result = run(x)
    result.set_(torch.ones(3))
    result = run(x)
    result.data = torch.ones(3)
    assert_same(run(x), expected)


def test_memory_returns_when_results_die() -> None:
    run = compiled(chain)
    x = torch.randn(LARGE)
    result = run(x)
    before = pool.live_bytes
    for _ in range(20):
        run(x)
    assert pool.live_bytes == before
    del result
    assert pool.live_bytes < before


@pytest.mark.parametrize(
    "identity",
    [
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.dropout(x, p=0.0),
        lambda x: torch.dropout(x, 0.5, train=False),
        torch.nn.Dropout().eval(),
    ],
    ids=["not in training", "p = 0", "torch.dropout", "module"],
)
def test_a_dropout_that_drops_nothing_is_its_operand(identity: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = identity(x)
        y += 1
        return y * 2, y

    x, reference = torch.ones(3), torch.ones(3)
    result = compiled(function)(x)
    assert_same(result, function(reference))
    assert_same(x, reference)
    assert result[1].data_ptr() == x.data_ptr()
