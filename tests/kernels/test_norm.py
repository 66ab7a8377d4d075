"""The norms without a GPU, beside `test_rows.py`: rows of one value, empty ones, some gradients; schedules that fit."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.contract import broken
from tests.gpu.kernels.launching import in_turn
from tests.kernels.devices import H200
from tilewright.bench.catalogue import suite
from tilewright.kernels import norm
from tilewright.kernels.norm import cuda
from tilewright.kernels.norm.cuda import Direction, NormCall, schedule_of
from tilewright.kernels.row import VECTOR, RowLayout
from tilewright.kernels.row_schedule import Schedule

CPU = torch.device("cpu")


def inputs_of(name: str, shape: tuple[int, int], dtype: str) -> tuple[Tensor, ...]:
    inputs: tuple[Tensor, ...] = suite(name).workload(shape, dtype).make(CPU, torch.Generator().manual_seed(0))
    return inputs


@pytest.mark.parametrize(
    ("columns", "value", "dtype"),
    in_turn(itertools.product([5, 999, 5000, 50257], [3.7, 1000.0, 1e-3]), [("float32", "bfloat16")]),
    ids=str,
)
def test_rows_of_one_value(columns: int, value: float, dtype: str) -> None:
    """Where the true result and the weight's gradient are 0."""
    x, weight, _ = inputs_of("layer_norm", (3, columns), dtype)
    x, bias = torch.full_like(x, value).requires_grad_(), torch.zeros_like(weight, requires_grad=True)
    assert broken(suite("layer_norm"), (x, weight, bias), norm.layer_norm) == []
    y = norm.layer_norm(x, weight, bias)
    (d_weight,) = torch.autograd.grad(y, weight, torch.randn_like(y))
    assert not y.any() and not d_weight.any()


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (2, 0, 16)], ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    weight, bias = (torch.randn(shape[-1:], requires_grad=True) for _ in range(2))
    y = norm.layer_norm(x, weight, bias)
    assert y.shape == x.shape
    y.sum().backward()
    assert weight.grad is not None and bias.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert bias.grad.shape == bias.shape


def test_gradient_through_one_result_only() -> None:
    x, residual, weight = inputs_of("add_rms_norm", (4, 16), "float32")
    with torch.no_grad():
        x[1, 3] = torch.nan
    _, total = norm.add_rms_norm(x, residual, weight)
    ours = torch.autograd.grad(total.sum(), (x, residual, weight))
    assert [gradient.unique().tolist() for gradient in ours] == [[1.0], [1.0], [0.0]], "no NaN"
    x, residual, weight = inputs_of("add_rms_norm", (4, 16), "float32")
    y, _ = norm.add_rms_norm(x, residual, weight)
    true = torch.autograd.grad(F.rms_norm(x + residual, (16,), weight, norm.FLOAT_EPSILON).sum(), (x, residual, weight))
    for a, b in zip(torch.autograd.grad(y.sum(), (x, residual, weight)), true, strict=True):
        torch.testing.assert_close(a, b)


def test_a_result_may_be_written_to() -> None:
    x, residual, weight = inputs_of("add_rms_norm", (4, 16), "float32")
    found = []
    for double in (lambda y: y.mul_(2.0), lambda y: 2.0 * y):
        ends = [double(norm.rms_norm(x, weight)), double(norm.add_rms_norm(x, residual, weight)[0])]
        found.append([*ends, *torch.autograd.grad(ends[0].sum() + ends[1].square().sum(), (x, weight))])
    for written, new in zip(*found, strict=True):
        torch.testing.assert_close(written, new)


COLUMNS = (
    1, 1000, 1024, 2056, 4096, 4097, 5000, 8192, 16384, 32768, 32769, 50257, 65536, 100003, 131072, 200000,
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
    refused = ("no kernel holds rows", "not whole vectors", "short rows")
    assert isinstance(found, Schedule) or any(why in found for why in refused)
    return found if isinstance(found, Schedule) else None


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_schedule_holds_its_rows_and_fits_the_device(
    direction: Direction, dtype: torch.dtype, residual: bool
) -> None:
    lanes = VECTOR // dtype.itemsize
    for columns in COLUMNS:
        made = call(direction, columns, dtype, residual)
        found = scheduled(made)
        if found is None:
            is_held = cuda.LONGEST_GENERATED < columns * dtype.itemsize <= 2**17
            is_whole = direction == "forward" or columns % lanes == 0
            assert not (is_held and is_whole), "long rows of models are held"
            continue
        # Of a row at the worst place where it can begin, every vector has a thread.
        before = found.line // dtype.itemsize - 1 if found.alignment == "PEELED" else 0
        assert found.row_threads * found.cluster * found.vectors * lanes >= columns + before
        assert found.row_threads == found.threads or (32 % found.row_threads == 0 and found.cluster == 1)
        assert found.threads * found.blocks <= 2048 and found.shared_bytes <= H200.shared_bytes_per_block
        if found.storage == "tma":
            assert found.block_vectors * found.cluster * lanes >= columns and found.stages >= 3
            assert found.alignment == "ALIGNED"


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_rows_end_with_their_block_forward(dtype: torch.dtype) -> None:
    """Up to 128 KiB, at any alignment."""
    columns = 131072 // dtype.itemsize
    layouts = (RowLayout(0, 9, columns), RowLayout(2 * dtype.itemsize, 9, columns))
    for inputs, alignment in (((layouts[0],), "ALIGNED"), (layouts, "SHIFTED")):
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
