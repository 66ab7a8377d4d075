"""Rings of rows in shared memory: they fit the device, and programs meet rows of one beginning."""

from __future__ import annotations

import math

import pytest

from tilewright.kernels import ring
from tilewright.kernels.ring import Task, Way

WAYS = (
    Way(2),
    Way(3),
    Way(4),
    Way(4, 256),
    Way(4, 320, 20),
    Way(8, depth=12),
)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("inputs, state, weights", [(1, 4, 0), (1, 8, 2), (2, 8, 1), (3, 8, 1)])
def test_a_plan_fits_the_device(way: Way, inputs: int, state: int, weights: int) -> None:
    for needed in (1, 5, 32, 33, 128, 129, 625, 1024, 2048, 6283, 16384, 32768, 65536):
        found = ring.plan(Task(needed, inputs, state, weights, 32), (way,))
        if found is None:
            assert needed > 2000
            continue
        assert found.width * found.cluster * found.vectors >= needed
        assert found.threads % 32 == 0 and found.threads <= max(way.threads, ring.SHORT_THREADS)
        assert found.width == found.threads or (32 % found.width == 0 and found.cluster == 1)
        assert found.depth > (found.lag + 1) * found.vectors, "the ring reads ahead"
        kept = found.kept * found.vectors * found.threads * 32
        assert found.shared_bytes == found.depth * inputs * found.threads * 16 + kept
        mail = (4 if found.lag else 2) * (found.cluster * found.threads // 32 * state + 16)
        assert found.shared_bytes + mail <= ring.LARGEST_BLOCK_BYTES
        assert found.blocks * (found.shared_bytes + mail + ring.BLOCK_OVERHEAD) <= ring.SHARED_BYTES
        assert found.blocks == 1 or found.blocks * found.threads <= 32 * way.warps


def test_weights_leave_shared_memory_where_the_row_needs_it() -> None:
    for row, way, kept in ((Task(65536, 1, 8, 2, 32), Way(8), 0), (Task(32768, 2, 8, 1, 16), Way(4), 1)):
        found = ring.plan(row, (way,))
        assert found is not None and found.kept == kept


def test_programs_step_over_rows_of_one_beginning() -> None:
    for columns in (256, 257, 258, 260, 5000, 50257):
        for itemsize in (2, 4):
            period = ring.period_of(columns * itemsize)
            assert period * columns * itemsize % 16 == 0
            for groups in (1, 2, 4, 16):
                for resident in (7, 16, 33, 264):
                    programs = ring.programs_of(resident, 10**6, groups, period)
                    assert programs * groups * columns * itemsize % 16 == 0
                    assert programs <= max(resident, period)
    assert ring.programs_of(264, 5, 1, 1) == 5
    assert math.gcd(ring.period_of(3), 16) == 16


def test_tensors_lie_alike() -> None:
    assert ring.alike(5000, [(0, 9, 5000), (1600, 9, 5008)], 2)
    assert ring.alike(3, [(0, 1, 7)], 2), "one row has no next one"
    assert not ring.alike(3, [(0, 2, 7)], 2)
    assert not ring.alike(16, [(8, 2, 16)], 2)
