"""The textbook product without a GPU: formula, registration, machine code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.hopper import assembled
from tests.kernels.layouts import layouts
from tilewright.kernels.catalogue import suite
from tilewright.kernels.matmul import cuda, matmul
from tilewright.measure.truth.proof import prove


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(0, 4, 5), (1, 1, 1), (4, 5, 0), (31, 24, 37)], ids=str)
def test_the_contract_is_kept(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = sizes
    ways = layouts(m, k, dtype), layouts(k, n, dtype, seed=1)
    for way in ways[0]:
        rows = prove(suite("matmul"), matmul, (ways[0][way].requires_grad_(), ways[1][way].requires_grad_()))
        assert [row for row in rows if not row.ok] == [], way


def test_operators_are_registered_well() -> None:
    a, b = torch.randn(4, 5, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    torch.library.opcheck(torch.ops.tilewright.matmul.default, (a, b))
    assert torch.autograd.gradgradcheck(matmul, (a.double(), b.double()))


def test_compiled_as_one_graph() -> None:
    a, b = torch.randn(4, 5, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    c = torch.compile(matmul, fullgraph=True, backend="aot_eager")(a, b)
    assert torch.equal(c, a @ b)
    assert torch.equal(torch.autograd.grad(c.sum(), a)[0], torch.ones(4, 3) @ b.t())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not \[4, 5\] and \[4, 5\]"):
        matmul(torch.empty(4, 5), torch.empty(4, 5))
    with pytest.raises(
        ValueError, match=r"one floating-point dtype and device, not torch\.float32 cpu, torch\.float64"
    ):
        matmul(torch.empty(4, 5), torch.empty(5, 4).double())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_triton_kernel_compiles_without_spills(dtype: str) -> None:
    pytest.importorskip("triton")
    from tests.kernels.machine_code import compiled, spilled
    from tilewright.kernels.matmul import triton as kernels

    types = dict.fromkeys("abc", f"*{dtype}") | dict.fromkeys(("m", "n", "k", "a_stride", "b_stride"), "i32")
    rows, columns, depth = (64, 64, 16) if dtype == "fp32" else (128, 256, 64)
    tile = {"ROWS": rows, "COLUMNS": columns, "DEPTH": depth}
    code = compiled(kernels._matmul, types, tile, ("n", "k", "a_stride", "b_stride"), 4 if dtype == "fp32" else 8)
    assert spilled(code) == 0
    assert ("wgmma" in code.asm["ptx"]) == (dtype != "fp32")


def test_the_cuda_kernel_does_not_spill(tmp_path: Path) -> None:
    assert assembled(cuda.SOURCE, (), tmp_path)["spilled"] == 0


def test_under_autocast_as_eager() -> None:
    a, b = torch.randn(5, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    found = []
    for product in (matmul, torch.mm):
        with torch.autocast("cpu", torch.bfloat16):
            end = product(a, b)
        found.append([end, *torch.autograd.grad(end.float().sum(), (a, b))])
    assert all(torch.equal(ours, true) for ours, true in zip(*found, strict=True))
