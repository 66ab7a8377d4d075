"""A row of logits becomes its loss and, in place, the gradient of its logits; one program a row.

    m = max x,  s = Σ exp(x - m),  lse = m + log s
    loss      = log s - (1 - ε) (x[target] - m) - ε (mean(x) - m) + z lse²
    dloss/dx  = share - ε/V - (1 - ε) [column = target] + 2 z lse share,  share = exp(x - m) / s

The maximum and the sum travel together (Milakov and Gimelshein 2018).

Limit: memory, 0.62 of a copy on an H200 (2630 GB/s at 3072x131072 in bf16), since the second read comes from
memory too; 4 % of the time of the whole loss.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.kernels.activation.formulas import rounded
from tilewright.kernels.device import runs_triton
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe

LONGEST_BLOCK = 16384
"""Columns that a program takes at once: 16 in each of 1024 threads."""
SCALE_BLOCK = 4096


@triton.jit
def _statistics(row, columns, BLOCK: tl.constexpr, SMOOTHING: tl.constexpr):
    """Maximum, sum of exponentials relative to it, and sum, of a row in fp32."""
    most = tl.full([], float("-inf"), tl.float32)
    exponentials = tl.zeros([], tl.float32)
    total = tl.zeros([], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(most, tl.max(x, 0))
        # A block of -inf alone must not give inf - inf.
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        exponentials = exponentials * tl.exp(most - shift) + tl.sum(tl.exp(x - shift), 0)
        if SMOOTHING:
            total += tl.sum(tl.where(at < columns, x, 0.0), 0)
        most = larger
    return most, exponentials, total


@triton.jit
def _loss_and_gradient(
    logits,
    targets,
    losses,
    applied,
    stride,
    columns,
    ignore_index,
    smoothing,
    z_loss,
    BLOCK: tl.constexpr,
    SMOOTHING: tl.constexpr,
    GRADIENT: tl.constexpr,
):
    """`applied` is a scalar that the gradient is multiplied by before it is rounded."""
    program = tl.program_id(0)
    row = logits + program.to(tl.int64) * stride
    target = tl.load(targets + program)
    if target == ignore_index:
        tl.store(losses + program, 0.0)
        if GRADIENT:
            for start in range(0, columns, BLOCK):
                at = start + tl.arange(0, BLOCK)
                tl.store(row + at, tl.zeros([BLOCK], row.dtype.element_ty), mask=at < columns)
    else:
        # Read before the reductions, whose barriers part it from the first write over the row. A target
        # that is no column gives NaN, since a kernel cannot raise.
        valid = (target >= 0) & (target < columns)
        wanted = tl.load(row + target, mask=valid, other=float("nan")).to(tl.float32)
        most, exponentials, total = _statistics(row, columns, BLOCK, SMOOTHING)
        log_sum = tl.log(exponentials)
        lse = most + log_sum
        # Relative to the maximum, and divided exactly: the loss of a single class is 0.
        loss = log_sum - (wanted - most)
        if SMOOTHING:
            mean = tl.div_rn(total, columns * 1.0)
            loss = (1.0 - smoothing) * loss + smoothing * (log_sum - (mean - most))
        tl.store(losses + program, loss + z_loss * lse * lse)
        if GRADIENT:
            factor = tl.load(applied)
            slope = factor / exponentials
            for start in range(0, columns, BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = tl.load(row + at, mask=at < columns).to(tl.float32)
                share = tl.exp(x - most) * slope
                gradient = share - smoothing / columns * factor
                gradient -= tl.where(at == target, (1.0 - smoothing) * factor, 0.0)
                # Last: added to a share of nearly one it would be lost in rounding.
                gradient += 2.0 * z_loss * lse * share
                tl.store(row + at, rounded(gradient, row.dtype.element_ty), mask=at < columns)


@triton.jit
def _scale(gradient, factor, n, BLOCK: tl.constexpr):
    """Multiplies in place, or leaves everything as it is where the factor is one."""
    by = tl.load(factor)
    if by != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(gradient + at, mask=at < n).to(tl.float32)
        tl.store(gradient + at, rounded(x * by, gradient.dtype.element_ty), mask=at < n)


def loss_and_gradient(
    call: RecipeBuilder, logits: Operand, target: Operand, losses: Operand, applied: Operand, ignore_index: int,
    label_smoothing: float, z_loss: float, gradient: bool,
) -> Recipe:  # fmt: skip
    """Write the loss of each row of `logits` [rows, columns] to `losses` [rows] fp32 and, where
    `gradient`, turn `logits` into the gradient times `applied` [] fp32. Rows must have stride 1 inside."""
    rows, columns = logits.shape
    block = min(triton.next_power_of_2(columns), LONGEST_BLOCK)
    call.launch(
        _loss_and_gradient, (rows,),
        logits, target, losses, applied, logits.stride(0), columns, ignore_index, label_smoothing, z_loss,
        BLOCK=block, SMOOTHING=label_smoothing != 0.0, GRADIENT=gradient,
        num_warps=min(max(block // 512, 4), 32),
    )  # fmt: skip
    return call.finish()


def scale(call: RecipeBuilder, gradient: Operand, factor: Operand) -> Recipe | None:
    """`gradient *= factor` for a contiguous tensor and a scalar [] in fp32 on the same device."""
    if not runs_triton(gradient):
        return None
    grid = (triton.cdiv(gradient.numel(), SCALE_BLOCK),)
    call.launch(_scale, grid, gradient, factor, gradient.numel(), BLOCK=SCALE_BLOCK, num_warps=8)
    return call.finish()
