"""Sums of an embedding's gradient without a GPU: PyTorch's operators, registration, machine code for an H200."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.embeddings import assert_sums
from tests.kernels.machine_code import compiled, spilled
from tilewright.kernels import embedding as _defines_the_operators  # noqa: F401


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(0, 3, 5), (1, 1, 1), (50, 11, 7), (4, 3, 0)], ids=str)
@pytest.mark.parametrize("padding", [-1, 0])
def test_sums_are_exact_but_for_one_rounding(sizes: tuple[int, int, int], dtype: torch.dtype, padding: int) -> None:
    positions, entries, columns = sizes
    assert_sums(torch.randn(positions, columns).to(dtype), torch.randint(entries, (positions,)), entries, padding)


def test_operators_are_registered_well() -> None:
    dout, (keys, order) = torch.randn(4, 3, 6), torch.randint(5, (12,), dtype=torch.int32).sort(stable=True)
    torch.library.opcheck(torch.ops.tilewright.embedding_sums.default, (dout, keys, order, 5, -1))
    torch.library.opcheck(torch.ops.tilewright.add_embedding_sums_.default, (torch.randn(5, 6), dout, keys, order, -1))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_kernels_compile_without_spills(dtype: str) -> None:
    pytest.importorskip("triton")
    from tilewright.kernels.embedding import triton as kernels

    types = {name: f"*{dtype}" for name in ("dout", "dweight")}
    types |= dict.fromkeys(("order", "bounds"), "*i64") | {"keys": "*i32", "parts": "*fp32"}
    types |= {"columns": "i32"} | dict.fromkeys(("count", "entries", "padding"), "i64")
    backward = {"CHUNK": kernels.CHUNK, "ROWS": kernels.PART_ROWS, "COLUMNS": kernels.MOST_COLUMNS, "ADD": False}
    codes = [
        compiled(kernels.backward, types, backward, ("columns",)),
        compiled(kernels.backward, types, backward | {"ADD": True}, ("columns",)),
        compiled(kernels.long_runs, types, backward, ("columns",)),
    ]
    bounds = compiled(kernels.find_bounds, types, {"STEPS": 20, "ENTRIES": kernels.BOUNDS})
    assert [spilled(code) for code in (bounds, *codes)] == [0, 0, 0, 0]
    assert all("ld.global.v4.b32" in code.asm["ptx"] for code in codes)
