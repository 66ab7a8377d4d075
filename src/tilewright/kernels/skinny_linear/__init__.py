"""x · Wᵀ for at most 64 rows of x, at the bandwidth of the weights: `tilewright::skinny_linear`.

y0, y1, y2 = x w0ᵀ, x w1ᵀ, x w2ᵀ                 one launch: queries, keys and values
y0 = silu(x w0ᵀ) · x w1ᵀ                         gated
y0 = x w0ᵀ + bias + residual
with a gain, x (one row) is first multiplied by gain / √(mean(x²) + eps): an RMS norm
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tilewright.hardware.architectures import limits_of
from tilewright.kernels.activation import formula
from tilewright.kernels.device import NARROW, runs_triton
from tilewright.kernels.registration import define
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe

MOST_ROWS = 64
ALIGNED = 16
"""Rows of x and of the weights begin at multiples of this many bytes."""
ROW_ELEMENTS = 8192
"""Elements of the weights that a program for one row loads at once."""
LONGEST = 2048
"""The most columns of such a tile."""
COLUMNS, WARPS = 128, 4
"""Columns of a tile for several rows; warps of a program."""
LEAST_STEPS, MOST_SPLITS = 4, 8
"""The fewest tiles of a split, and the most splits of a block."""
PROGRAMS_PER_MULTIPROCESSOR = 2
"""A call splits its columns to have at least this many programs per multiprocessor."""


class Tiling(NamedTuple):
    """How a call is divided among programs."""

    rows: int
    """Rows of x in a tile; 1: no tensor cores."""
    block_rows: int
    """Rows of a weight in a tile."""
    block_columns: int
    splits: int
    blocks: int
    """Blocks of rows of all weights."""
    stages: int
    """Tiles in flight."""


def plan(count: int, columns: int, outputs: Sequence[int], gated: bool, multiprocessors: int) -> Tiling:
    """The tiling for x [count, columns] and results with these numbers of columns."""
    if count == 1:
        width = min(LONGEST, 1 << (columns - 1).bit_length())
        height = max(ROW_ELEMENTS // width // (1 + gated), 1)
        return Tiling(1, height, width, 1, _blocks(outputs, height), 1)
    rows = max(16, 1 << (count - 1).bit_length())
    height = 32 if rows == 16 or gated else 64
    blocks, steps = _blocks(outputs, height), -(-columns // COLUMNS)
    wanted = -(-PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // blocks)
    splits = max(1, min(wanted, steps // LEAST_STEPS, MOST_SPLITS))
    # As many stages as leave room in shared memory for two programs a multiprocessor.
    return Tiling(rows, height, COLUMNS, splits, blocks, 3 if rows == MOST_ROWS else 4)


def _blocks(outputs: Sequence[int], height: int) -> int:
    return sum(-(-size // height) for size in outputs)


def refusal(x: torch.Tensor | Operand, weights: Sequence[torch.Tensor | Operand]) -> str | None:
    """Why the kernel does not support x [rows, columns] and weights [outputs, columns]; None if it does."""
    if x.dtype not in NARROW or {w.dtype for w in weights} != {x.dtype}:
        return "it takes bf16 and fp16"
    if not 1 <= x.shape[0] <= MOST_ROWS:
        return f"it takes 1 to {MOST_ROWS} rows"
    step = ALIGNED // x.dtype.itemsize
    if any(y.stride(1) != 1 or y.stride(0) % step or y.data_ptr() % ALIGNED for y in (x, *weights)):
        return "rows do not begin at multiples of 16 bytes"
    return None


Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _forward(
    x: torch.Tensor, gain: torch.Tensor | None, eps: float, w0: torch.Tensor, w1: torch.Tensor | None,
    w2: torch.Tensor | None, b0: torch.Tensor | None, b1: torch.Tensor | None, b2: torch.Tensor | None,
    residual: torch.Tensor | None, activation: str, zeros: torch.Tensor | None,
) -> Results:  # fmt: skip
    if gain is not None:
        x = F.rms_norm(x, x.shape[1:], gain, eps)
    pairs = (w0, b0), (w1, b1), (w2, b2)
    results = [x.new_empty(0) if w is None else F.linear(x, w, bias) for w, bias in pairs]
    if activation == "swiglu":
        results[:2] = [F.silu(results[0]) * results[1], x.new_empty(0)]
    else:
        results[0] = formula(results[0], activation)
    if residual is not None:
        results[0] = results[0] + residual
    return results[0], results[1], results[2]


def _fake(
    x: torch.Tensor, gain: torch.Tensor | None, eps: float, w0: torch.Tensor, w1: torch.Tensor | None,
    w2: torch.Tensor | None, b0: torch.Tensor | None, b1: torch.Tensor | None, b2: torch.Tensor | None,
    residual: torch.Tensor | None, activation: str, zeros: torch.Tensor | None,
) -> Results:  # fmt: skip
    made = [
        x.new_empty(0) if w is None or (place and activation == "swiglu") else x.new_empty(x.shape[0], w.shape[0])
        for place, w in enumerate((w0, w1, w2))
    ]
    return made[0], made[1], made[2]


def _recipe(
    call: RecipeBuilder, x: Operand, gain: Operand | None, eps: float, w0: Operand, w1: Operand | None,
    w2: Operand | None, b0: Operand | None, b1: Operand | None, b2: Operand | None, residual: Operand | None,
    activation: str, zeros: Operand | None,
) -> Recipe | None:  # fmt: skip
    weights = [w for w in (w0, w1, w2) if w is not None]
    if not runs_triton(x) or refusal(x, weights) is not None or (gain is not None and x.shape[0] > 1):
        return None
    from tilewright.kernels.skinny_linear.triton import skinny_linear

    (count, columns), gated = x.shape, activation == "swiglu"
    outputs = [w.shape[0] for w in weights][: 1 if gated else 3]
    made = plan(count, columns, outputs, gated, limits_of(x.device).multiprocessors)
    if made.splits > 1 and (zeros is None or zeros.shape[0] < made.blocks):
        return None
    results = [call.empty((count, n), x.dtype) for n in outputs]
    results += [call.empty((0,), x.dtype) for _ in range(3 - len(outputs))]
    scratch = None
    if made.splits > 1:
        scratch = call.empty(((1 + gated) * made.blocks * made.splits * made.block_rows * made.rows,), torch.float32)
    strides = [w.stride(0) for w in weights] + [0] * (3 - len(weights))
    sizes = outputs + [0] * (3 - len(outputs))
    call.launch(
        skinny_linear, (made.blocks * made.splits,), x, gain, w0, w1, w2, b0, b1, b2, residual,
        *(y if n < len(outputs) else None for n, y in enumerate(results)), scratch, zeros if made.splits > 1 else None,
        count, *sizes, x.stride(0), *strides, 0 if residual is None else residual.stride(0), float(eps),
        columns=columns, WEIGHTS=len(outputs), NORM=gain is not None, B0=b0 is not None, B1=b1 is not None,
        B2=b2 is not None, RESIDUAL=residual is not None, KIND=activation, ROWS=made.rows, SPLITS=made.splits,
        BLOCK_N=made.block_rows, BLOCK_K=made.block_columns, num_warps=WARPS, num_stages=made.stages,
    )  # fmt: skip
    return call.finish(*results)


skinny_linear = define("skinny_linear", _forward, _fake, recipe=_recipe)
