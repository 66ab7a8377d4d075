"""Results: their structure, and that their memory is theirs for as long as anyone holds them."""

import io
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from tests.backend.compiling import agrees, assert_same, chain, compiled, with_grad
from tilewright.runtime.pool import pool

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
