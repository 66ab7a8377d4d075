"""Schedules of the norms: they hold every row and fit the device."""

import pytest
import torch

from tests.kernels.devices import H200
from tilewright.kernels.norm import cuda
from tilewright.kernels.norm.cuda import Direction, NormCall, schedule_of
from tilewright.kernels.row import VECTOR, RowLayout
from tilewright.kernels.row_schedule import Schedule

COLUMNS = (
    1, 2, 31, 256, 257, 1000, 1024, 4096, 4097, 5000, 8192, 16384, 32768, 32769, 50257, 65536, 100003, 131072, 200000,
    262144,
)  # fmt: skip
BF16, FP32 = torch.bfloat16, torch.float32


def call(
    direction: Direction, columns: int, dtype: torch.dtype, residual: bool = False, weights: int = 2, rows: int = 5000
) -> NormCall:
    inputs = (1 if direction == "forward" else 2) + residual
    return cuda.contiguous(direction, rows, columns, dtype, inputs, weights, weights > 1)


def scheduled(made: NormCall) -> Schedule | None:
    found = schedule_of(made, H200)
    assert isinstance(found, Schedule) or "no kernel holds rows" in found or "not whole vectors" in found
    return found if isinstance(found, Schedule) else None


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_schedule_holds_its_rows_and_fits_the_device(
    direction: Direction, dtype: torch.dtype, residual: bool
) -> None:
    lanes, inputs = VECTOR // dtype.itemsize, (1 if direction == "forward" else 2) + residual
    for columns in COLUMNS:
        made = call(direction, columns, dtype, residual)
        found = scheduled(made)
        if found is None:
            held = 2**17
            is_whole = direction == "forward" or columns % lanes == 0
            assert columns * dtype.itemsize > held or not is_whole, "rows of models are held"
            continue
        # Of a row at the worst place where it can begin, every vector has a thread.
        before = found.line // dtype.itemsize - 1 if found.alignment == "PEELED" else 0
        assert found.row_threads * found.cluster * found.vectors * lanes >= columns + before
        assert found.row_threads == found.threads or (32 % found.row_threads == 0 and found.cluster == 1)
        assert found.threads * found.blocks <= 2048 and found.shared_bytes <= H200.shared_bytes_per_block
        if found.storage == "ring":
            # Sums of a block's rows meet where the ring was, in fp32.
            assert found.rows_per_block == 1 or found.stages * inputs * VECTOR >= found.vectors * lanes * 4
        if found.storage == "tma":
            assert found.block_vectors * found.cluster * lanes >= columns and found.stages >= 3
            assert found.alignment == "ALIGNED"


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_rows_end_with_their_block_forward(dtype: torch.dtype) -> None:
    """Up to 128 KiB, at any alignment."""
    columns = 131072 // dtype.itemsize
    layouts = (RowLayout(0, 9, columns), RowLayout(2 * dtype.itemsize, 9, columns))
    for inputs, alignment in (((layouts[0],), "ALIGNED"), (layouts, "SCALAR")):
        found = schedule_of(NormCall("forward", columns, dtype, inputs, dtype, True, True), H200)
        assert isinstance(found, Schedule) and (found.storage, found.alignment) == ("registers", alignment)
    assert "no kernel holds rows" in str(schedule_of(call("forward", columns + 1, dtype), H200))


def test_rows_that_lie_otherwise_than_the_results_are_refused() -> None:
    assert "not whole vectors" in str(
        schedule_of(NormCall("backward", 4096, BF16, (RowLayout(2, 9, 4096),) * 2, BF16, True, True), H200)
    )
    assert schedule_of(NormCall("forward", 8, torch.float64, (RowLayout(0, 1, 8),), None, False, True), H200) == (
        "torch.float64 has no CUDA C++ kernel"
    )


def test_a_block_takes_several_short_rows() -> None:
    for columns, dtype in ((512, BF16), (256, FP32), (384, BF16), (8, BF16)):
        found = scheduled(call("backward", columns, dtype))
        assert found is not None and found.rows_per_block > 1
    for columns, dtype in ((520, BF16), (260, FP32), (5000, BF16), (32768, BF16)):
        found = scheduled(call("backward", columns, dtype))
        assert found is not None and found.rows_per_block == 1
