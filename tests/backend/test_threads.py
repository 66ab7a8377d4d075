"""Several threads, backward on a thread of its own, and a process forked after the first call."""

import subprocess
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from tests.backend.compiling import assert_same, chain, compiled, differentiate, twin
from tests.processes import start
from tests.waiting import HANG_S, in_threads
from tilewright.runtime.pool import pool

LARGE = (1000, 300)
several_tracing = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.13",
    reason="PyTorch refuses any compiled call while another thread traces",
)


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(torch.tanh(x), x.shape[-1:])


def check(run: Callable[..., torch.Tensor], eager: Callable[..., torch.Tensor], seed: int, times: int = 8) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(times):
        x = torch.randn(LARGE, generator=generator, requires_grad=True)
        y = twin(x)
        assert_same(differentiate(run(x)), differentiate(eager(y)))
        assert_same(x.grad, y.grad)


def test_four_threads_share_one_compiled_function() -> None:
    run = compiled(chain)
    check(run, chain, 0, times=1)
    in_threads([partial(check, run, chain, seed) for seed in range(4)])


@several_tracing
def test_four_threads_compile_and_run_their_own() -> None:
    functions = [chain, norm, lambda x: chain(x) * 3, lambda x: norm(x) + x]
    in_threads([partial(check, compiled(f), f, seed, times=4) for seed, f in enumerate(functions)])


@several_tracing
def test_new_sizes_from_several_threads() -> None:
    run = compiled(chain, dynamic=True)

    def sizes(offset: int) -> None:
        for rows in range(2, 8):
            x = torch.randn(rows + offset % 2, 40)
            with torch.no_grad():
                assert_same(run(x), chain(x))

    in_threads([partial(sizes, offset) for offset in range(4)])


def test_a_result_that_dies_on_another_thread_returns_its_memory() -> None:
    run = compiled(chain)
    before = pool.live_bytes
    held = [run(torch.randn(LARGE))]
    assert pool.live_bytes > before
    in_threads([held.clear])
    assert pool.live_bytes == before


def test_another_number_of_threads_between_calls() -> None:
    run = compiled(lambda x: (chain(x), x.sum(0)))
    x = torch.randn(600, 300)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3, 2, 1):
            torch.set_num_threads(count)
            assert_same(run(x), (chain(x), x.sum(0)))
    finally:
        torch.set_num_threads(threads)


SCENARIOS = ["fork_after_a_call", "fork_while_others_allocate", "data_loader_workers", "a_pool_of_processes"]


@pytest.fixture(scope="module")
def outcome() -> tuple[str, str]:
    """stdout and stderr of a process that runs all scenarios."""
    process = start(["-m", "tests.backend.forking", *SCENARIOS])
    try:
        return process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_fork(scenario: str, outcome: tuple[str, str]) -> None:
    printed, errors = outcome
    assert f"{scenario} done" in printed.splitlines(), errors
