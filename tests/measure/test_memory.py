"""Peaks of known sequences of allocations, to the byte."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from tilewright.measure import memory
from tilewright.measure.memory import peak_bytes, register_pool

KIB = 1024


def block(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


class Pool:
    """A pool of host memory: it counts what it lends and tells its meter."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.changed: Callable[[], None] = lambda: None

    def take(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.changed()


@contextmanager
def registered(pool: Pool) -> Iterator[Pool]:
    meter = register_pool(lambda: pool.live_bytes)
    pool.changed = meter.changed
    try:
        yield pool
    finally:
        memory._pools.remove(meter)


def test_a_known_sequence_has_its_known_peak() -> None:
    def sequence() -> torch.Tensor:
        first = block(100 * KIB)
        second = block(50 * KIB)
        del first
        third = block(80 * KIB)
        del second
        return third

    assert peak_bytes(sequence) == 150 * KIB


def test_the_result_is_live_and_nothing_is_zero() -> None:
    assert peak_bytes(lambda: block(3)) == 3
    assert peak_bytes(lambda: None) == 0
    assert peak_bytes(lambda: block(0)) == 0


def test_temporaries_inside_operators_count() -> None:
    a, b = torch.randn(2, 64, 64)
    # a*b and its sum with a are both live while the second is made.
    assert peak_bytes(lambda: a * b + a) == 2 * a.nbytes


def test_backward_counts_what_forward_saved() -> None:
    x = torch.randn(KIB, requires_grad=True)

    def step() -> None:
        # exp saves its result; the gradient of sum is expanded, not stored.
        torch.exp(x).sum().backward()
        x.grad = None

    tensor = x.nbytes
    scalars = 4 + 4
    assert 2 * tensor <= peak_bytes(step) <= 2 * tensor + scalars


def test_older_tensors_change_nothing_even_at_an_address_seen_before() -> None:
    kept: list[torch.Tensor] = []
    assert peak_bytes(lambda: kept.append(block(200 * KIB))) == 200 * KIB
    kept.clear()
    # Most likely at the address that the last profile left as taken.
    kept.append(block(200 * KIB))

    def release_then_take() -> None:
        kept.clear()
        block(10 * KIB)

    assert peak_bytes(release_then_take) == 10 * KIB


def test_a_pool_adds_on_the_same_timeline() -> None:
    with registered(Pool()) as pool:
        pool.take(7 * KIB)

        def sequence() -> None:
            first = block(100 * KIB)
            pool.take(30 * KIB)
            del first
            pool.take(40 * KIB)
            second = block(20 * KIB)
            pool.take(-70 * KIB)
            third = block(90 * KIB)
            del second, third

        # 100+30 is the peak; were releases or pool steps out of order, it would be 170 or 180.
        assert peak_bytes(sequence) == 130 * KIB
        assert pool.live_bytes == 7 * KIB


def test_several_pools_add_up_and_one_may_shrink_below_its_start() -> None:
    with registered(Pool()) as one, registered(Pool()) as two:
        one.take(50)

        def sequence() -> None:
            one.take(-50)
            two.take(70)
            one.take(10)

        assert peak_bytes(sequence) == 30


def test_an_unregistered_pool_is_forgotten() -> None:
    with registered(Pool()) as pool:
        pass
    assert peak_bytes(lambda: pool.take(10)) == 0


def test_a_failure_passes_through_and_the_next_peak_is_right() -> None:
    with registered(Pool()) as pool:
        with pytest.raises(ZeroDivisionError):
            peak_bytes(lambda: 1 // 0)
        pool.take(11)
        assert peak_bytes(lambda: block(5)) == 5


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    peak_bytes(lambda: block(1))
    assert capfd.readouterr() == ("", "")


@pytest.mark.gpu
def test_cuda_counts_blocks_above_the_start() -> None:
    held = torch.empty(2**20, dtype=torch.uint8, device="cuda")

    def sequence() -> None:
        first = torch.empty_like(held)
        second = torch.empty_like(held)
        del first, second

    assert peak_bytes(sequence, "cuda") == 2 * held.nbytes
