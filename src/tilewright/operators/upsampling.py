"""Upsampling by nearest neighbours of the last two dimensions, where sizes are whole multiples; its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from tilewright.operators.arithmetic import NOTHING, per_result
from tilewright.operators.excerpt import excerpt, picked, positions, refuse_repeats
from tilewright.operators.language import Unfusable, Value, call
from tilewright.operators.pieces import like_the_input
from tilewright.operators.row import Call, body
from tilewright.operators.shapes import kept

MOST_REPEATS = 25
"""An element that is repeated more often is left to PyTorch: each place is a load of its own in backward."""


def _factors(small: Sequence[int], large: Sequence[int], scales: Sequence[float | None]) -> tuple[int, int]:
    """How often each row and column is repeated. Raises `Unfusable` for other sizes and scales."""
    found = []
    for low, high, scale in zip(small[-2:], large[-2:], scales, strict=True):
        factor = high // low
        if high % low or (scale is not None and scale != factor):
            raise Unfusable("an upsampling that repeats some elements more often than others")
        found.append(factor)
    return found[0], found[1]


@body(
    "upsample_nearest2d.default(self, output_size, scales_h, scales_w)",
    promotion="none",
    shapes=kept,
    arithmetic=NOTHING,
)
def upsample_nearest2d(
    c: Call, x: Value, output_size: Sequence[int], scales_h: float | None = None, scales_w: float | None = None
) -> Value:
    rank, factors = len(x.dims), _factors(x.shape, c.shape, (scales_h, scales_w))
    refuse_repeats(x, factors[0] * factors[1])
    for dim, factor in zip((-2, -1), factors, strict=True):
        if factor > 1:
            x = picked(x, dim, call("idiv", positions(c.trace, c.shape[dim], dim, rank), factor))
    return x


@body(
    "upsample_nearest2d_backward.default(grad_output, output_size, input_size, scales_h, scales_w)",
    arithmetic=per_result(1),
    promotion="none",
    shapes=like_the_input,
)
def upsample_nearest2d_backward(
    c: Call,
    g: Value,
    output_size: Sequence[int],
    input_size: Sequence[int],
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    rows, columns = _factors(c.shape, g.shape, (scales_h, scales_w))
    if rows * columns > MOST_REPEATS:
        raise Unfusable(f"an element of more than {MOST_REPEATS} neighbours")
    refuse_repeats(g, rows * columns)
    total: Value | None = None
    for i, j in product(range(rows), range(columns)):
        part = excerpt(excerpt(g, -2, c.shape[-2], i, rows), -1, c.shape[-1], j, columns)
        total = part if total is None else total + part
    assert total is not None
    return total
