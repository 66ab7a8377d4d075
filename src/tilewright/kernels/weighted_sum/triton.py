"""The weighted sum of rows in Triton, tiled in two dimensions.

Forward: a program owns ROWS rows and walks along them in tiles of COLUMNS columns, adding products into a tile of
sums that stays in registers; it sums across the tile once, at the end. ⌈rows / ROWS⌉ programs run, with
⌈columns / COLUMNS⌉ steps each.

Backward: a program owns COLUMNS columns of every S-th tile of rows, so that programs that run together work on
neighbouring rows. It writes its tiles of dx and keeps its partial sum of dw in registers; a second kernel adds the S
partial sums, always in the same order.

Where tiles do not fill the rows, only the last of a row has a mask over columns, which splits 16-byte vectors.

Limit: memory. On an H200, 16384 x 16384 bf16: forward 0.98 of the read bandwidth of `torch.sum` over 1 GiB,
backward 0.93 of a copy. Shorter rows have smaller tiles.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.kernels.activation.formulas import rounded


@triton.jit
def forward(
    x: tl.tensor, w: tl.tensor, y: tl.tensor, rows: tl.tensor, columns: tl.tensor, pitches: tl.int64,
    PITCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """y[r] = Σ_c x[r, c]·w[c]; from row to row of x it is pitches·PITCH elements. WHOLE: tiles fill the rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Rows past the last are the last again, which is cheaper than a mask on every load.
    x += (tl.minimum(row, rows - 1).to(tl.int64) * pitches * PITCH)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    whole = columns if WHOLE else columns // COLUMNS * COLUMNS
    for start in range(0, whole, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        weight = tl.load(w + column).to(tl.float32)
        total += tl.load(x + column[None, :]).to(tl.float32) * weight[None, :]
    if not WHOLE:
        column = whole + tl.arange(0, COLUMNS)
        weight = tl.load(w + column, mask=column < columns, other=0.0).to(tl.float32)
        tile = tl.load(x + column[None, :], mask=(column < columns)[None, :], other=0.0)
        total += tile.to(tl.float32) * weight[None, :]
    tl.store(y + row, rounded(tl.sum(total, 1), y.dtype.element_ty), mask=row < rows)


@triton.jit
def _down(
    dy: tl.tensor, x: tl.tensor, w: tl.tensor, dx: tl.tensor, parts: tl.tensor, rows: tl.tensor,
    columns: tl.tensor, pitches: tl.tensor, PITCH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr, WANT_DX: tl.constexpr, WANT_DW: tl.constexpr,
) -> None:  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    within = tl.full([COLUMNS], True, tl.int1) if WHOLE else column < columns
    weight = tl.load(w + column, mask=within, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = start + tl.arange(0, ROWS)
        incoming = tl.load(dy + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        inside = (row < rows)[:, None] & within[None, :]
        place = row.to(tl.int64)[:, None]
        if WANT_DW:
            tile = tl.load(x + place * pitches * PITCH + column[None, :], mask=inside, other=0.0)
            total += tile.to(tl.float32) * incoming
        if WANT_DX:
            value = rounded(incoming * weight[None, :], dx.dtype.element_ty)
            tl.store(dx + place * (columns // PITCH) * PITCH + column[None, :], value, mask=inside)
    if WANT_DW:
        tl.store(parts + tl.program_id(1) * columns + column, tl.sum(total, 0), mask=within)


@triton.jit
def backward(
    dy: tl.tensor, x: tl.tensor, w: tl.tensor, dx: tl.tensor, parts: tl.tensor, rows: tl.tensor,
    columns: tl.tensor, pitches: tl.int64, PITCH: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WANT_DX: tl.constexpr, WANT_DW: tl.constexpr,
) -> None:  # fmt: skip
    """dx = dy ⊗ w; parts[s, c] = Σ dy[r]·x[r, c] over every S-th tile of rows from s on; program (columns, s of S)."""
    if (tl.program_id(0) + 1) * COLUMNS <= columns:
        _down(dy, x, w, dx, parts, rows, columns, pitches, PITCH, ROWS, COLUMNS, True, WANT_DX, WANT_DW)
    else:
        _down(dy, x, w, dx, parts, rows, columns, pitches, PITCH, ROWS, COLUMNS, False, WANT_DX, WANT_DW)


@triton.jit
def sum_parts(
    parts: tl.tensor, dw: tl.tensor, count: tl.tensor, columns: tl.tensor, PARTS: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    """dw[c] = Σ_s parts[s, c] for s < count."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for first in range(0, count, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = (part < count)[:, None] & (column < columns)[None, :]
        total += tl.load(parts + part[:, None] * columns + column[None, :], mask=inside, other=0.0)
    tl.store(dw + column, rounded(tl.sum(total, 0), dw.dtype.element_ty), mask=column < columns)
