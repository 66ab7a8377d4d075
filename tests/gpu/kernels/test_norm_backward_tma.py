"""Backward by bulk copies on a GPU: the numbers contract, few rows and many a program, in blocks and in clusters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilewright.bench.catalogue import suite
from tilewright.hardware.architectures import limits_of
from tilewright.kernels.norm import cuda
from tilewright.kernels.norm.cuda import schedule_of
from tilewright.kernels.row_schedule import Schedule
from tilewright.measure.truth.proof import prove

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")


def inputs_of(name: str, shape: tuple[int, int], dtype: str) -> tuple[Tensor, ...]:
    inputs: tuple[Tensor, ...] = suite(name).workload(shape, dtype).make(GPU, torch.Generator(GPU).manual_seed(0))
    return inputs


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape",
    [(1, 2056), (5, 2056), (3000, 2056), (1000, 5000), (1, 8192), (900, 8192), (2, 32768), (700, 32768)],
    ids=str,
)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_layer_norm"])
def test_the_numbers_contract(name: str, shape: tuple[int, int], dtype: str) -> None:
    inputs = inputs_of(name, shape, dtype)
    sums = 1 if name == "rms_norm" else 2
    lined = shape[1] % 64 == 0
    call = cuda.contiguous("backward", *shape, inputs[0].dtype, 3 if "add" in name else 2, sums, sums > 1)
    found = schedule_of(call, limits_of(GPU))
    assert isinstance(found, Schedule)
    assert found.storage == ("ring" if lined and (dtype == "float32" or sums == 1) else "tma")
    assert [row for row in prove(suite(name), suite(name).variant("tilewright").function, inputs) if not row.ok] == []


@pytest.mark.parametrize("columns", [5000, 32768])
def test_gradients_are_the_same_at_every_run(columns: int) -> None:
    x, weight, bias = inputs_of("layer_norm", (200, columns), "bfloat16")
    function = suite("layer_norm").variant("tilewright").function
    dy = torch.randn_like(x)
    first, second = (torch.autograd.grad(function(x, weight, bias), (x, weight, bias), dy) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_rows_at_a_distance() -> None:
    _, weight, bias = inputs_of("layer_norm", (90, 5000), "bfloat16")
    x = torch.randn(90, 5008, device=GPU).bfloat16()[:, :5000].requires_grad_()
    found = prove(suite("layer_norm"), suite("layer_norm").variant("tilewright").function, (x, weight, bias))
    assert [row for row in found if not row.ok] == []
