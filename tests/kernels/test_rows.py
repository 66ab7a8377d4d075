"""Rows as their kernels see them."""

from __future__ import annotations

from tilewright.kernels.row import RowLayout, alignment_of


def test_how_tensors_lie_together() -> None:
    contiguous = RowLayout(0, 9, 5000)
    assert alignment_of(5000, 2, (contiguous, RowLayout(64, 9, 5008))) == "ALIGNED"
    assert alignment_of(5000, 2, (contiguous, RowLayout(64, 9, 5001))) == "SCALAR"
    assert alignment_of(5000, 2, (contiguous, RowLayout(2, 9, 5000))) == "SCALAR"
    assert alignment_of(3, 2, (RowLayout(0, 1, 3), RowLayout(0, 1, 7))) == "PEELED", "one row has no next one"
    assert alignment_of(5001, 2, (RowLayout(0, 9, 5001),) * 2) == "PEELED"
    assert alignment_of(16392, 2, (RowLayout(0, 9, 16392),)) == "PEELED", "long rows are counted from lines"
