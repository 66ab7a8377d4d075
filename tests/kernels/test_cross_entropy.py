"""Cross entropy on the CPU: the operator's contract with PyTorch, its formula, and its machine code."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels import machine_code
from tests.kernels.losses import OPTIONS, proved, targets
from tests.kernels.nvcc import spilled
from tests.kernels.rows import SPECIALS, layout
from tilewright.bench.suites.cross_entropy import SUITES
from tilewright.kernels.cross_entropy import cross_entropy, cuda
from tilewright.kernels.cross_entropy import triton as kernels
from tilewright.kernels.row import Alignment

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["1x1", "0x7", "5x1", "7x33", "every other row", "transposed", *SPECIALS])
def test_numbers_contract(case: str, dtype: torch.dtype) -> None:
    assert [row for row in proved(layout(case, dtype, CPU), {}, "auto") if not row.ok] == []


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any]) -> None:
    assert [row for row in proved(layout("7x33", torch.float32, CPU), options, "auto") if not row.ok] == []


def test_opcheck() -> None:
    logits = torch.randn(6, 9, requires_grad=True)
    for reduction in ("mean", "none"):
        torch.library.opcheck(
            torch.ops.tilewright.cross_entropy.default,
            (logits, targets(logits), -100, 0.1, 1e-3, reduction, False, "auto"),
        )


def test_z_loss_remains_where_one_class_has_all() -> None:
    logits = 30 * torch.eye(3)[:1]
    single = torch.randn(4, 1, dtype=torch.float32)
    for z_loss, smoothing, given in ((1e-4, 0.0, logits), (1e-4, 0.7, single)):
        ours, true = (
            torch.autograd.grad(
                cross_entropy(x, torch.zeros(len(x), dtype=torch.long), z_loss=z_loss, label_smoothing=smoothing), x
            )[0].double()
            for x in (given.clone().requires_grad_(), given.double().requires_grad_())
        )
        torch.testing.assert_close(ours, true, rtol=1e-6, atol=0)


def test_targets_of_any_integer_dtype() -> None:
    logits = torch.randn(4, 100)
    target = torch.tensor([0, 99, 5, 7])
    wanted = cross_entropy(logits, target)
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert torch.equal(cross_entropy(logits, target.to(dtype)), wanted)


def test_nothing_counted() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    target = torch.full((3,), -100)
    assert cross_entropy(logits, target).isnan()
    assert cross_entropy(logits, target, reduction="sum") == 0
    (gradient,) = torch.autograd.grad(cross_entropy(logits, target, reduction="sum"), logits)
    assert gradient.eq(0).all()


def test_a_class_that_is_none_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        cross_entropy(torch.randn(3, 5), torch.full((3,), 5))


def test_the_suite_counts_its_bytes() -> None:
    suite = SUITES["cross_entropy"]
    workload = suite.workload((6, 9), "bfloat16")
    logits, target = workload.make(CPU, torch.Generator())
    assert workload.name == "6x9 bf16"
    assert workload.work["fwd"].nbytes == logits.nbytes + target.nbytes
    assert workload.work["bwd"].nbytes == 2 * logits.nbytes + target.nbytes
    losses = [suite.variant(name).function(logits, target) for name in ("tilewright", "torch", "eager")]
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(losses[0], losses[2], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("alignment", ["ALIGNED", "PEELED"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [64, 256, 300, 1024, 131072])
def test_cuda_does_not_spill(columns: int, dtype: torch.dtype, alignment: Alignment) -> None:
    found = cuda.forward_schedule(columns, dtype.itemsize, alignment)
    assert spilled(cuda.SOURCE, cuda.definitions(found, dtype, False))["forward"] == 0
    found = cuda.backward_schedule(columns, dtype.itemsize, alignment)
    for gradient in (dtype, torch.float32):
        assert spilled(cuda.SOURCE, cuda.definitions(found, dtype, False, gradient))["backward"] == 0


def test_triton_does_not_spill() -> None:
    types = dict.fromkeys(("logits", "gradient", "out"), "*bf16") | {"target": "*i64"}
    types |= dict.fromkeys(("losses", "statistics", "weight", "block_sums"), "*fp32")
    types |= dict.fromkeys(("rows", "columns", "stride", "out_stride", "gradient_stride", "ignored"), "i32")
    types |= dict.fromkeys(("smoothing", "z_loss"), "fp32")
    sizes = kernels.blocks(50257)
    for kernel in (kernels.forward_rows, kernels.backward_tiles):
        code = machine_code.compiled(kernel, types, sizes | {"SMOOTH": True, "EACH": True}, warps=sizes["num_warps"])
        assert machine_code.spilled(code) == 0
    types |= {"total": "*bf16", "count": "i32"}
    for mean in (False, True):
        code = machine_code.compiled(kernels.finish, types, {"MEAN": mean, "BLOCK": kernels.SUM_BLOCK})
        assert machine_code.spilled(code) == 0
