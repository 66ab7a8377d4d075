"""The backward kernel of wide rows without a GPU: how rows lie on the device, and machine code for an H200."""

from __future__ import annotations

import collections
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.kernels.nvcc import spilled
from tilewright.kernels import ring
from tilewright.kernels.norm import cuda, wide
from tilewright.kernels.row import Edges


@pytest.mark.parametrize("inputs", [2, 3])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_wide_rows_fit_the_device(itemsize: int, inputs: int) -> None:
    for columns in (1, 255, 1031, 2049, 4096, 4097, 5000, 8192, 16411, 50257, 65536, 100003, 131071, 262144):
        found = wide.plan(columns, itemsize, inputs, itemsize, 2)
        vectors = ring.needed(columns, itemsize)
        if found is None:
            room = (ring.LARGEST_BLOCK_BYTES - wide.DESK_BYTES) // (16 * (wide.LEAST_ROWS * inputs + 1))
            lined = columns * itemsize % wide.LINE == 0
            assert vectors < wide.LEAST or (lined and itemsize == 4) or vectors > 16 * min(room, 14 * 32 * 4), columns
            continue
        assert found.share * found.count >= vectors and found.threads * found.vectors >= found.count
        assert found.rows >= wide.LEAST_ROWS
        assert found.shared_bytes == found.count * (found.rows * inputs * 16 + 16)
        assert found.shared_bytes + wide.DESK_BYTES <= ring.LARGEST_BLOCK_BYTES
        assert found.blocks * (found.shared_bytes + wide.DESK_BYTES + ring.BLOCK_OVERHEAD) <= ring.SHARED_BYTES
        assert found.block_threads <= 1024


def test_rings_have_the_rows_that_they_are_faster_with() -> None:
    assert wide.plan(2048, 2, 2, 2, 2) is None and wide.plan(8192, 4, 2, 4, 2) is None
    assert wide.plan(8192, 2, 2, 2, 1) is None and wide.plan(8192, 2, 2, 2, 2) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("columns", [5000, 50257, 65536, 262144])
def test_the_kernel_of_wide_rows_compiles_without_spills(columns: int, centered: bool, dtype: torch.dtype) -> None:
    lie: Edges = "RAGGED" if columns % 2 else "WHOLE"
    build = cuda.Build(dtype, dtype, True, centered, centered, False, lie, 16, True)
    plan = wide.plan(columns, dtype.itemsize, 2, dtype.itemsize, 1 + centered)
    if plan is None:
        assert dtype == torch.float32 and columns % 32 == 0
        return
    period = ring.period_of(columns * dtype.itemsize)
    definitions = (*plan.definitions(), *build.definitions(), ("PERIOD", period))
    assert spilled(wide.SOURCE, definitions) == {"norm_backward_wide": 0}


ROWS_OF_PROGRAMS = """
#define __device__
#define __forceinline__ inline
#include <cstdio>
#include "shares.cuh"
int main() {
    for (int program = 0; program < PROGRAMS; program++) {
        const Place at{program, PROGRAMS, 0, 0};
        Share share(ROWS, at);
        for (long long turn = 0; share.position < share.end;) {
            const Segment part = share.next();
            const Order order = share.order_of(part);
            for (int i = 0; i < part.turns; i++, turn++)
                printf("%d %d %lld %lld\\n", program, part.slot, part.row, order.row_of(turn));
        }
    }
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("period, rows, programs", [
    (1, 7, 3), (1, 5, 5), (4, 1001, 15), (8, 5341, 30), (8, 300, 7), (8, 9, 9), (8, 61, 2), (2, 64, 5), (8, 5, 5),
    (4, 4000, 16), (8, 800, 12)
])  # fmt: skip
def test_programs_share_the_rows(period: int, rows: int, programs: int, tmp_path: Path) -> None:
    (tmp_path / "rows.cpp").write_text(ROWS_OF_PROGRAMS)
    sizes = [f"-D{name}={value}" for name, value in (("PERIOD", period), ("ROWS", rows), ("PROGRAMS", programs))]
    subprocess.run(
        ["g++", "-std=c++17", f"-I{wide.SOURCE.parent}", *sizes, "rows.cpp", "-o", "rows"], cwd=tmp_path, check=True
    )
    printed = subprocess.run([tmp_path / "rows"], capture_output=True, text=True, check=True).stdout
    taken = [tuple(map(int, line.split())) for line in printed.splitlines()]
    assert sorted(row for *_, row in taken) == list(range(rows)), "each row once"
    counts = collections.Counter(program for program, *_ in taken)
    assert max(counts.values()) - min(counts.values()) <= 1 and len(counts) == programs
    slots = collections.defaultdict(set)
    for program, slot, like, row in taken:
        assert (row - like) % period == 0, "rows of a segment begin alike"
        slots[slot].add((program, row % period))
    assert all(len(owners) == 1 for owners in slots.values())
    assert sorted(slots) == list(range(wide.segments(rows, programs, period))), "no sum is missing"
