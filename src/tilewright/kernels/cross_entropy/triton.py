"""Cross entropy over rows of logits in Triton: forward reads a row once, block by block; backward takes it in tiles."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import rounded
from tilewright.launch.builder import Operand, RecipeBuilder

TILE = 4096
"""Elements of a program's tile."""
SUM_BLOCK = 1024
"""Partial sums that `finish` adds at once."""
LOWEST = tl.constexpr(-3.402823466e38)
"""Finite, so that -inf minus it is no NaN."""


@triton.jit
def forward_rows(
    logits, target, losses, statistics, block_sums, rows, columns, stride, ignored, smoothing, z_loss,
    SMOOTH: tl.constexpr, EACH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    start = logits + row[:, None] * stride
    most = tl.full((BLOCK_ROWS,), LOWEST, tl.float32)
    total = tl.full((BLOCK_ROWS,), 0.0, tl.float32)
    plain = tl.full((BLOCK_ROWS,), 0.0, tl.float32)
    first = 0
    while first < columns:
        col = first + tl.arange(0, BLOCK_COLS)[None, :]
        inside = (row < rows)[:, None] & (col < columns)
        a = tl.load(start + col, inside, other=float("-inf")).to(tl.float32)
        # max drops NaN; the sum of exponentials brings it back.
        above = tl.maximum(most, tl.max(a, 1))
        total = total * tl.exp(most - above) + tl.sum(tl.exp(a - above[:, None]), 1)
        most = above
        if SMOOTH:
            plain += tl.sum(tl.where(inside, a, 0.0), 1)
        first += BLOCK_COLS
    label = tl.load(target + row, row < rows, other=ignored)
    known = (label >= 0) & (label < columns)
    # For a label that is no column the loss is NaN, and nothing outside the row is read.
    wanted = tl.load(logits + row * stride + label, (row < rows) & known, other=float("nan")).to(tl.float32)
    log_sum = tl.log(total)
    loss = log_sum - (wanted - most)
    if SMOOTH:
        loss = (1.0 - smoothing) * loss + smoothing * (log_sum - (tl.div_rn(plain, columns * 1.0) - most))
    loss += z_loss * (most + log_sum) * (most + log_sum)
    loss = tl.where(label == ignored, 0.0, loss)
    if EACH:
        tl.store(losses + row, rounded(loss, losses.dtype.element_ty), row < rows)
    tl.store(block_sums + 2 * tl.program_id(0), tl.sum(loss, 0))
    tl.store(block_sums + 2 * tl.program_id(0) + 1, tl.sum(tl.where(label == ignored, 0.0, 1.0), 0))
    tl.store(statistics + row, most, row < rows)
    tl.store(statistics + rows + row, log_sum, row < rows)


@triton.jit
def finish(block_sums, total, weight, count, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """One program adds the sums of `count` programs: `total` gets the loss, `weight` the weight of one row."""
    loss, rows = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    start = 0
    while start < count:
        at = start + tl.arange(0, BLOCK)
        loss += tl.load(block_sums + 2 * at, at < count, other=0.0)
        rows += tl.load(block_sums + 2 * at + 1, at < count, other=0.0)
        start += BLOCK
    share = tl.div_rn(1.0, tl.sum(rows, 0)) if MEAN else 1.0
    tl.store(total, rounded(tl.sum(loss, 0) * share, total.dtype.element_ty))
    tl.store(weight, share)


@triton.jit
def backward_tiles(
    logits, target, statistics, gradient, weight, out, rows, columns, stride, out_stride, gradient_stride, ignored,
    smoothing, z_loss, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    pieces = tl.cdiv(columns, BLOCK_COLS)
    row = (tl.program_id(0) // pieces).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = (tl.program_id(0) % pieces) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]
    label = tl.load(target + row, row < rows, other=ignored)
    counted = label != ignored
    known = (label >= 0) & (label < columns)
    inside = (row < rows) & (col < columns)
    a = tl.load(logits + row * stride + col, inside & counted, other=0.0).to(tl.float32)
    most = tl.load(statistics + row, row < rows, other=0.0)
    log_sum = tl.load(statistics + rows + row, row < rows, other=0.0)
    scale = tl.load(gradient + row * gradient_stride, row < rows, other=0.0).to(tl.float32) * tl.load(weight)
    scale = tl.where(known, scale, float("nan"))
    # One exponential of the difference would have a larger argument, and a larger rounding error.
    share = tl.exp(a - most) * tl.exp(-log_sum)
    miss = tl.div_rn(smoothing, columns * 1.0)
    # Written so that nothing cancels; for a single class this is exactly 0.
    change = share - tl.where(col == label, 1.0 - smoothing + miss, miss)
    # Add this last: if one class has all of the probability, only this term is left.
    change = (change + 2.0 * z_loss * (most + log_sum) * share) * scale
    # An ignored row is NaN where PyTorch's is: if it has NaN or +inf, or only -inf.
    tl.store(
        out + row * out_stride + col,
        rounded(tl.where(counted, change, log_sum - log_sum), out.dtype.element_ty),
        inside,
    )


def blocks(columns: int) -> dict[str, int]:
    """The tile for rows of `columns` elements, as launch arguments."""
    block_cols = min(triton.next_power_of_2(columns), TILE)
    return {"BLOCK_ROWS": TILE // block_cols, "BLOCK_COLS": block_cols, "num_warps": 8}


def forward(
    call: RecipeBuilder, logits: Operand, target: Operand, ignored: int, smoothing: float, z_loss: float,
    reduction: str, dtype: torch.dtype,
) -> tuple[Operand, Operand, Operand]:  # fmt: skip
    """The loss in `dtype`; each row's maximum and log Σ exp(x - maximum), [2, N]; the weight of one row, []."""
    rows, columns = logits.shape
    sizes, each = blocks(columns), reduction == "none"
    programs = triton.cdiv(rows, sizes["BLOCK_ROWS"])
    loss = call.empty((rows,) if each else (), dtype)
    statistics, weight = call.empty((2, rows), torch.float32), call.empty((), torch.float32)
    block_sums = call.empty((programs, 2), torch.float32)
    call.launch(
        forward_rows, (programs,),
        logits, target, loss, statistics, block_sums, rows, columns, logits.stride(0), ignored, smoothing, z_loss,
        SMOOTH=smoothing != 0, EACH=each, **sizes,
    )  # fmt: skip
    total = call.empty((), dtype) if each else loss
    call.launch(finish, (1,), block_sums, total, weight, programs, MEAN=reduction == "mean", BLOCK=SUM_BLOCK)
    return loss, statistics, weight


def backward(
    call: RecipeBuilder, gradient: Operand, logits: Operand, target: Operand, statistics: Operand, weight: Operand,
    out: Operand, ignored: int, smoothing: float, z_loss: float,
) -> None:  # fmt: skip
    """The gradient of the logits [N, C] into `out`, from that of the loss, [] or [N]."""
    rows, columns = logits.shape
    sizes = blocks(columns)
    programs = triton.cdiv(rows, sizes["BLOCK_ROWS"]) * triton.cdiv(columns, sizes["BLOCK_COLS"])
    call.launch(
        backward_tiles, (programs,),
        logits, target, statistics, gradient, weight, out, rows, columns, logits.stride(0), out.stride(0),
        gradient.stride(0) if gradient.dim() else 0, ignored, smoothing, z_loss, **sizes,
    )  # fmt: skip
