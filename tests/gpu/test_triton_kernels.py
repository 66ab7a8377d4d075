"""Generated Triton kernels on a GPU: the programs of the interpreter's tests, and sizes beyond 32 bits."""

from collections.abc import Callable, Mapping

import pytest
import torch

from tests.emit import stored_values
from tests.emit.triton_programs import DRAWS, PROGRAMS, by_triton, check_program, nests_of, operators
from tests.operators.samples import CALLS, VIEWS
from tilewright.emit.triton import emit_triton
from tilewright.launch.generated import TritonKernel
from tilewright.records.measurement import Verified
from tilewright.schedule.choose import schedule_of
from tilewright.schedule.tiles import Limits

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
PAST_32_BITS = 2**31 + 12345


@pytest.mark.parametrize("blocks", ["default", "small"])
@pytest.mark.parametrize("name", [*PROGRAMS, *DRAWS])
def test_kernels_keep_the_numbers_contract(name: str, blocks: str) -> None:
    small = by_triton(lambda lowered: schedule_of(lowered.nest, Limits(3, 64)))
    check_program(name, GPU, small if blocks == "small" else by_triton())


@pytest.fixture(scope="module")
def checked() -> Mapping[str, list[tuple[str, Verified]]]:
    return operators(GPU)


CPU_ALONE = {"log_sigmoid_backward.default"}
"""Reads a buffer that is empty on a GPU, where the operator stays PyTorch's."""


@pytest.mark.parametrize("name", [name for name in (*CALLS, *VIEWS) if name not in CPU_ALONE])
def test_operators_keep_the_numbers_contract(checked: Mapping[str, list[tuple[str, Verified]]], name: str) -> None:
    assert checked[name]
    assert [entry for entry in checked[name] if not entry[1].ok] == []


@pytest.mark.parametrize("offset", [0, 1])
def test_a_kernel_compiled_ahead_takes_pointers_aligned_or_not(offset: int) -> None:
    x = torch.randn(20000 * 130 + 1, device=GPU)[offset : offset + 20000 * 130].view(20000, 130)
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda x: x.sum(0), lambda x: x.softmax(-1)]
    for function in functions:
        (lowered,) = nests_of(function, x)
        kernel = TritonKernel(lowered.nest, emit_triton(lowered.nest))
        kernel.compile(GPU)
        expected = function(x.double())
        result = torch.full(expected.shape, float("nan"), device=GPU)
        kernel.launch([x, result])
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_that_an_integer_cannot_hold(source: torch.dtype, dtype: torch.dtype) -> None:
    values = [500.0, 200.7, -1.5, -300.0, 7e4, -7e4, 3e9, -3e9, 2.0**31 + 256, 2.0**32 + 77, 1e20, -1e20]
    x = torch.tensor([*values, float("nan"), float("inf"), -float("inf")], dtype=source, device=GPU)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).to(source) * 2

    (lowered,) = nests_of(function, x)
    result = torch.empty_like(x)
    by_triton()(lowered, [x, result])
    assert torch.equal(result, function(x))


@pytest.mark.parametrize("source", stored_values.SOURCES, ids=str)
@pytest.mark.parametrize("dtype", stored_values.FLOAT8, ids=str)
def test_floats_of_8_bits_are_eagers(dtype: torch.dtype, source: torch.dtype) -> None:
    for function, x in stored_values.conversions(dtype, source):
        x = x.to(GPU)
        (lowered,) = nests_of(function, x)
        result = torch.empty_like(function(x))
        by_triton()(lowered, [x, result])
        assert stored_values.same(result, function(x))


@pytest.mark.parametrize("dtype", [*stored_values.SOURCES, torch.float64], ids=str)
@pytest.mark.parametrize("divisor", [1.5, 0.1, 3e38, 1e-40, 0.0])
def test_quotients_by_a_number_are_eagers(divisor: float, dtype: torch.dtype) -> None:
    """Bit for bit: they may be rounded to floats of 8 bits next."""
    x = torch.cat([torch.randn(20000), torch.tensor([0.0, -0.0, float("inf"), float("nan")])]).to(GPU, dtype)
    (lowered,) = nests_of(lambda x: x / divisor, x)
    result = torch.empty_like(x)
    by_triton()(lowered, [x, result])
    torch.testing.assert_close(result, x / divisor, rtol=0, atol=0, equal_nan=True)


def test_column_sums_are_the_same_at_every_run() -> None:
    x = torch.randn(20000, 130, device=GPU)
    (lowered,) = nests_of(lambda x: x.sum(0), x)
    results = [torch.empty(130, device=GPU) for _ in range(2)]
    for result in results:
        by_triton()(lowered, [x, result])
    assert torch.equal(*results)


def test_one_axis_past_32_bits() -> None:
    x = torch.arange(PAST_32_BITS, dtype=torch.int64, device=GPU).to(torch.int8)
    y = torch.empty_like(x)
    (lowered,) = nests_of(lambda x: x * 3 + 1, x)
    by_triton()(lowered, [x, y])
    assert torch.equal(y, x * 3 + 1)


def test_rows_and_columns_past_32_bits() -> None:
    """Each kernel form on 2²¹ + 3 rows of 1024, the last rows beyond what 32 bits can count."""
    x = torch.randn(2**21 + 3, 1024, device=GPU, dtype=torch.bfloat16)
    (softmax,) = nests_of(lambda x: x.softmax(-1), x)
    y = torch.empty_like(x)
    by_triton()(softmax, [x, y])
    torch.testing.assert_close(y[-5:], x[-5:].softmax(-1))
    (tiles,) = nests_of(lambda x, column: x * column, x, x[:, :1])
    by_triton()(tiles, [x, x[:, :1], y])
    torch.testing.assert_close(y[-5:], x[-5:] * x[-5:, :1])
    (sums,) = nests_of(lambda x: x.sum(0), x)
    total = torch.empty(1024, device=GPU, dtype=torch.bfloat16)
    by_triton()(sums, [x, total])
    true = sum(part.double().sum(0) for part in x.split(2**18))
    torch.testing.assert_close(total.double(), true, rtol=2**-8, atol=1e-3)
