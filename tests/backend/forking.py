"""Run by test_fork.py in a process of its own: call, fork, and call in the child."""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch
from torch.utils.data import DataLoader, Dataset

from tests.backend.compiling import assert_same, chain, compiled
from tests.waiting import HANG_S
from tilewright.runtime.executable import threads
from tilewright.runtime.pool import pool

RUN = compiled(chain, dynamic=False)
X = torch.randn(1000, 300)


def step() -> torch.Tensor:
    x = X.clone().requires_grad_()
    RUN(x).sum().backward()
    assert x.grad is not None
    return x.grad


def in_fork(job: Callable[[], None]) -> None:
    """Run `job` in a forked child; raises where the child hangs or fails."""
    child = os.fork()
    if child == 0:
        try:
            job()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise TimeoutError("the child hangs")


def fork_after_a_call() -> None:
    expected = step()

    def child() -> None:
        with torch.no_grad():
            result = RUN(X)
        assert threads() == 1
        torch.set_num_threads(1)  # eager's own operators hang in a forked child with more
        assert_same(result, chain(X))
        if not torch.backends.cuda.is_built():  # else autograd itself refuses after a fork
            assert_same(step(), expected)
        # A size that is new here: traced, compiled and loaded in the child.
        assert_same(RUN(X[:7]), chain(X[:7]))

    in_fork(child)
    assert_same(step(), expected)


def fork_while_others_allocate() -> None:
    with torch.no_grad():
        RUN(X)
    stop = threading.Event()

    def allocate() -> None:
        while not stop.is_set():
            pool.empty((900, 300), (300, 1), torch.float32, 270000)

    workers = [threading.Thread(target=allocate) for _ in range(3)]
    for worker in workers:
        worker.start()
    try:
        for _ in range(15):
            in_fork(run_once)
    finally:
        stop.set()
        for worker in workers:
            worker.join()


def run_once() -> None:
    with torch.no_grad():
        RUN(X)


class Compiled(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        rows: torch.Tensor = RUN(X + index)[:2]
        return rows


def data_loader_workers() -> None:
    with torch.no_grad():
        RUN(X)
        batches: Iterator[torch.Tensor] = iter(DataLoader(Compiled(), batch_size=1, num_workers=2, timeout=HANG_S))
        for index, batch in enumerate(batches):
            assert_same(batch[0], chain(X + index)[:2])


def _sum_of(value: float) -> float:
    torch.set_num_threads(1)
    return float(RUN(X * value).sum())


def a_pool_of_processes() -> None:
    with torch.no_grad():
        expected = [float(RUN(X * value).sum()) for value in (1.0, 2.0, 3.0)]
        with multiprocessing.get_context("fork").Pool(2) as workers:
            assert_same(workers.map_async(_sum_of, (1.0, 2.0, 3.0)).get(HANG_S), expected)


if __name__ == "__main__":
    for scenario in sys.argv[1:]:
        globals()[scenario]()
        print(f"{scenario} done", flush=True)
