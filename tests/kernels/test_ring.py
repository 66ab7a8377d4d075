"""Rings of rows in shared memory: they fit the device, and programs meet rows of one beginning."""

from __future__ import annotations

import pytest

from tests.kernels.devices import H200, limits
from tilewright.kernels import ring
from tilewright.kernels.ring import RingShape, Task
from tilewright.kernels.row import RowLayout, alignment_of
from tilewright.kernels.row_schedule import CLUSTERS, Schedule

SHAPES = (
    RingShape(2),
    RingShape(3),
    RingShape(4),
    RingShape(4, 256),
    RingShape(4, 320, 20),
    RingShape(8, stages=12),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("inputs, state, weights", [(1, 4, 0), (1, 8, 2), (2, 8, 1), (3, 8, 1)])
def test_a_plan_fits_the_device(shape: RingShape, inputs: int, state: int, weights: int) -> None:
    for needed in (1, 5, 32, 33, 128, 129, 625, 1024, 2048, 6283, 16384, 32768, 65536):
        found = ring.plan(Task(needed, inputs, state, weights, 32), (shape,), H200)
        if found is None:
            assert needed > 2000
            continue
        assert found.row_threads * found.cluster * found.vectors >= needed
        assert found.threads % 32 == 0 and found.threads <= max(shape.threads, ring.SHORT_THREADS)
        assert found.row_threads == found.threads or (32 % found.row_threads == 0 and found.cluster == 1)
        assert found.stages > (found.lag + 1) * found.vectors, "the ring reads ahead"
        kept = found.kept * found.vectors * found.threads * 32
        assert found.shared_bytes == found.stages * inputs * found.threads * 16 + kept
        reduction = (4 if found.lag else 2) * (found.cluster * found.threads // 32 * state + 16)
        assert found.shared_bytes + reduction <= H200.shared_bytes_per_block
        assert found.blocks * (found.shared_bytes + reduction + H200.shared_reserved) <= H200.shared_bytes
        assert found.blocks == 1 or found.blocks * found.threads <= 32 * shape.warps


def test_weights_leave_shared_memory_where_the_row_needs_it() -> None:
    for row, shape, kept in ((Task(65536, 1, 8, 2, 32), RingShape(8), 0), (Task(32768, 2, 8, 1, 16), RingShape(4), 1)):
        found = ring.plan(row, (shape,), H200)
        assert found is not None and found.kept == kept


@pytest.mark.parametrize("capability", ["10.0", "12.0"])
def test_a_plan_asks_for_no_more_than_the_device_has(capability: str) -> None:
    device = limits(capability)
    for needed in (1, 33, 625, 4096, 16384, 65536):
        found = ring.plan(Task(needed, 2, 8, 1, 32), (RingShape(4), RingShape(8)), device)
        assert found is None or found.cluster <= device.largest_cluster
        assert found is None or found.shared_bytes < device.shared_bytes_per_block
    assert isinstance(ring.plan(Task(625, 2, 8, 1, 32), (RingShape(4),), device), Schedule)
    assert CLUSTERS[-1] > limits("12.0").largest_cluster


def test_how_tensors_lie_together() -> None:
    contiguous = RowLayout(0, 9, 5000)
    assert alignment_of(5000, 2, (contiguous, RowLayout(64, 9, 5008))) == "ALIGNED"
    assert alignment_of(5000, 2, (contiguous, RowLayout(64, 9, 5001))) == "SCALAR"
    assert alignment_of(5000, 2, (contiguous, RowLayout(2, 9, 5000))) == "SCALAR"
    assert alignment_of(3, 2, (RowLayout(0, 1, 3), RowLayout(0, 1, 7))) == "PEELED", "one row has no next one"
    assert alignment_of(5001, 2, (RowLayout(0, 9, 5001),) * 2) == "PEELED"
    assert alignment_of(16392, 2, (RowLayout(0, 9, 16392),)) == "PEELED", "long rows are counted from lines"
