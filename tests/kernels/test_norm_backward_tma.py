"""Which rows the programs of `backward_tma.cu` take, and which kernel takes which rows."""

from __future__ import annotations

import collections
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.kernels.devices import H200
from tilewright.kernels.norm import cuda
from tilewright.kernels.norm.schedule import schedule_of, segments
from tilewright.kernels.row_schedule import Schedule


def storage(columns: int, dtype: torch.dtype, sums: int) -> str:
    found = schedule_of(cuda.contiguous("backward", 500, columns, dtype, 2, sums, sums > 1), H200)
    assert isinstance(found, Schedule)
    return found.storage


def test_rings_have_the_rows_that_they_are_faster_with() -> None:
    assert storage(2048, torch.bfloat16, 2) == "ring" and storage(8192, torch.float32, 2) == "ring"
    assert storage(8192, torch.bfloat16, 1) == "ring" and storage(8192, torch.bfloat16, 2) == "tma"
    assert storage(5000, torch.bfloat16, 1) == "tma" and storage(5000, torch.float32, 1) == "tma"


ROWS_OF_PROGRAMS = """
#define __device__
#define __forceinline__ inline
#include <cstdio>
#include "row_assignment.cuh"
int main() {
    for (int program = 0; program < PROGRAMS; program++) {
        const Place at{program, PROGRAMS, 0, 0};
        RowAssignment assignment(ROWS, at);
        for (long long turn = 0; assignment.position < assignment.end;) {
            const Segment part = assignment.next();
            const RowOrder order = assignment.order_of(part);
            for (int i = 0; i < part.row_count; i++, turn++)
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
    subprocess.run(["g++", "-std=c++17", f"-I{cuda.HERE}", *sizes, "rows.cpp", "-o", "rows"], cwd=tmp_path, check=True)
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
    assert sorted(slots) == list(range(segments(rows, programs, period))), "no sum is missing"
