"""The machine code of the products of few rows: vectors, copies ahead, and no registers without room."""

from collections.abc import Sequence

import pytest

from tests.kernels.machine_code import compiled, spilled
from tilewright.kernels.skinny_linear import WARPS, plan

pytest.importorskip("triton")


def code(rows: int, columns: int, outputs: Sequence[int], gated: bool = False, norm: bool = False) -> str:
    """PTX for bf16 on an H200; nothing spills, and two programs at least have room in shared memory."""
    from tilewright.kernels.skinny_linear.triton import skinny_linear

    made = plan(rows, columns, outputs, gated, 132)
    types = {name: "i32" for name in skinny_linear.arg_names} | {"scratch": "*fp32", "zeros": "*i32", "eps": "fp32"}
    types |= {name: "*bf16" for name in ("x", "gain", "residual", "b0", "b1", "b2")}
    types |= {f"{kind}{n}": "*bf16" for kind in "wy" for n in range(3)}
    absent = [*["gain"][norm:], "b0", "b1", "b2", "residual", *["scratch", "zeros"][2 * (made.splits > 1) :]]
    absent += [f"w{n}" for n in range(len(outputs) + gated, 3)] + [f"y{n}" for n in range(len(outputs), 3)]
    constants = dict.fromkeys(absent) | {
        "columns": columns, "WEIGHTS": len(outputs), "NORM": norm, "B0": False, "B1": False, "B2": False,
        "RESIDUAL": False, "KIND": "swiglu" if gated else "none",
        "ROWS": made.rows, "SPLITS": made.splits, "BLOCK_N": made.block_rows, "BLOCK_K": made.block_columns,
    }  # fmt: skip
    strides = [name for name in skinny_linear.arg_names if name.endswith("_stride")]
    found = compiled(skinny_linear, types, constants, strides, WARPS, made.stages)
    assert spilled(found) == 0 and 2 * found.metadata.shared < 227 * 1024
    return str(found.asm["ptx"])


@pytest.mark.parametrize(
    ("columns", "outputs", "gated"),
    [(2048, [2048, 512, 512], False), (2048, [512, 512], False), (8192, [2048], False), (2048, [8192], True)],
)
def test_one_row_reads_vectors(columns: int, outputs: list[int], gated: bool) -> None:
    ptx = code(1, columns, outputs, gated, norm=True)
    assert ptx.count("ld.global.v4") >= 8 and "mma" not in ptx


@pytest.mark.parametrize("rows", [2, 32, 64])
@pytest.mark.parametrize(("columns", "outputs", "gated"), [(2048, [512, 512], False), (2048, [8192], True)])
def test_several_rows_copy_ahead_to_tensor_cores(rows: int, columns: int, outputs: list[int], gated: bool) -> None:
    ptx = code(rows, columns, outputs, gated)
    assert "cp.async.cg.shared.global" in ptx and ("mma.sync" in ptx or "wgmma" in ptx)
