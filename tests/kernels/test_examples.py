"""The kernels of `examples/` without a GPU: how the bench finds them, and their machine code."""

import itertools

import pytest
import torch

from examples.kernels import gelu, matmul, softmax, weighted_sum
from tests.kernels.nvcc import build
from tilewright.bench.catalogue import suite


def test_the_bench_runs_the_example_of_the_checkout() -> None:
    x = torch.randn(7, 33)
    ours = suite("softmax").variant("eager").function(x)
    torch.testing.assert_close(ours, torch.softmax(x, -1))


def test_softmax_in_steps_and_online() -> None:
    x = torch.randn(7, 33, dtype=torch.float64)
    for function in (softmax.steps, softmax.online_loop):
        torch.testing.assert_close(function(x), torch.softmax(x, -1))


def test_gelu_is_refused_on_a_cpu() -> None:
    with pytest.raises(ValueError, match=r"on a CUDA device, not torch\.float32 on cpu"):
        gelu.gelu(torch.randn(3))


@pytest.mark.parametrize(("dtype", "backward"), [*zip(gelu.ELEMENTS, itertools.cycle((True, False)), strict=False)])
def test_gelu_in_cuda_does_not_spill(dtype: torch.dtype, backward: bool) -> None:
    assert not any(build(gelu.SOURCE, gelu.definitions(dtype, True, backward)).spilled.values())


def test_the_product_in_cuda_does_not_spill() -> None:
    assert not any(build(matmul.SOURCE, ()).spilled.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_product_in_triton_compiles_without_spills(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from tests.kernels.machine_code import compiled, spilled

    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    types = dict.fromkeys("abc", f"*{short}") | dict.fromkeys(("m", "n", "k", "a_stride", "b_stride"), "i32")
    tile = dict(zip(("ROWS", "COLUMNS", "DEPTH"), matmul.tile_of(dtype), strict=True))
    fp32 = dtype == torch.float32
    code = compiled(matmul._matmul, types, tile, ("n", "k", "a_stride", "b_stride"), 4 if fp32 else 8)
    assert spilled(code) == 0
    assert ("wgmma" in code.asm["ptx"]) == (not fp32)


def test_the_weighted_sum_compiles_without_spills() -> None:
    pytest.importorskip("triton")
    from tests.kernels.machine_code import compiled, spilled

    types = dict.fromkeys("xwy", "*bf16") | dict.fromkeys(("rows", "columns", "x_row"), "i32")
    tile = {"ROWS": weighted_sum.ROWS, "COLUMNS": weighted_sum.COLUMNS}
    code = compiled(weighted_sum.forward, types, tile, ("columns", "x_row"), weighted_sum.WARPS)
    assert spilled(code) == 0 and "ld.global.v4.b32" in code.asm["ptx"]
