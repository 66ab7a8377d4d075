"""The weighted sum without a GPU: formula, registration, geometry, machine code for an H200."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.layouts import layouts
from tests.kernels.machine_code import compiled, spilled
from tests.proving import prove
from tilewright.bench.catalogue import suite
from tilewright.kernels.weighted_sum import weighted_sum

SHAPES = [(0, 5), (1, 1), (7, 1), (7, 37), (3, 1000)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_contract_is_kept(shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = layouts(1, shape[1], dtype, seed=1)["misaligned"][0].requires_grad_()
    for way, x in layouts(*shape, dtype).items():
        rows = prove(suite("weighted_sum"), weighted_sum, (x.requires_grad_(), w))
        assert [row for row in rows if not row.ok] == [], way


def test_any_leading_dimensions() -> None:
    x, w = torch.randn(2, 3, 4), torch.randn(4)
    torch.testing.assert_close(weighted_sum(x, w), x @ w)
    torch.testing.assert_close(weighted_sum(x[0, 0], w), x[0, 0] @ w)


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_operators_are_registered_well(wanted: tuple[bool, bool]) -> None:
    x, w = torch.randn(5, 8, requires_grad=wanted[0]), torch.randn(8, requires_grad=wanted[1])
    torch.library.opcheck(torch.ops.tilewright.weighted_sum.default, (x, w))
    backward = torch.ops.tilewright.weighted_sum_backward.default
    torch.library.opcheck(backward, (torch.randn(5), x.detach(), w.detach(), *wanted))


def test_tiles_cover_rows_and_columns() -> None:
    pytest.importorskip("triton")
    from tilewright.kernels.weighted_sum import triton as kernels

    for rows in (1, 2, 1000, 16384):
        for columns in (1, 5, 512, 4096, 16384, 10**6):
            high, wide, warps = kernels.forward_tile(rows, columns)
            assert high & (high - 1) == 0 == wide & (wide - 1)
            assert high * wide <= 2048 and 32 * warps <= 1024
            assert high < 2 * rows and wide < 2 * columns


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("pitch", [1, 16])
def test_kernels_compile_without_spills(dtype: str, pitch: int) -> None:
    pytest.importorskip("triton")
    from tilewright.kernels.weighted_sum import triton as kernels

    types = {name: f"*{dtype}" for name in ("x", "w", "y", "dy", "dx", "dw")} | {"parts": "*fp32", "pitches": "i64"}
    types |= dict.fromkeys(("rows", "columns", "count"), "i32")
    high, wide, warps = kernels.forward_tile(16384, 16384)
    forward = {"PITCH": pitch, "ROWS": high, "COLUMNS": wide, "WHOLE": pitch == 16}
    backward = {"PITCH": pitch, "ROWS": kernels.BACKWARD_ROWS, "COLUMNS": kernels.BACKWARD_COLUMNS}
    codes = [
        compiled(kernels.forward, types, forward, warps=warps),
        compiled(kernels.backward, types, backward | {"WANT_DX": True, "WANT_DW": True}),
    ]
    assert [spilled(code) for code in codes] == [0, 0]
    # The vectors of w are wide in any case.
    of_w = wide * (4 if dtype == "fp32" else 2) // (16 * 32 * warps)
    assert (codes[0].asm["ptx"].count("ld.global.v4.b32") > of_w) == (pitch == 16)
    assert ("st.global.v4.b32" in codes[1].asm["ptx"]) == (pitch == 16)
