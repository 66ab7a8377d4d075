"""How a generated Triton kernel is launched: programs, blocks, warps and scratch, from the nest and the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.emit.triton_schedule import REGISTERS, TritonSchedule
from tilewright.launch.triton import WARP
from tilewright.loops.blocks import block_width, power_of_two
from tilewright.loops.nest import Access, Level, Nest

TILE = 1024
"""Elements of a block on a GPU: eight for each thread of four warps."""
INTERPRETED_TILE = 16384
"""The interpreter's time depends on the number of programs and operations, hardly on elements."""
PER_PROCESSOR = 16
"""Programs per multiprocessor above which fewer, larger programs are balanced as well."""
SLOW = frozenset({"rsqrt", "sqrt", "div", "exp", "log", "tanh", "erf", "pow", "sigmoid"})
"""Functions that take many times what a multiplication does."""
MANY_COLUMN_VALUES = 3
SECTOR = 16
"""Elements of 16 bits in 32 bytes, which memory moves at once."""
LEAST_COLUMNS = 32
"""Columns of a program that takes all rows: two sectors of 16-bit elements, or more."""
LONG_BLOCK = 2048
"""Columns that a program takes at once from a row too long to hold."""
WAVES = 2
"""Programs for each multiprocessor where each owns a strip of rows."""
MOST_AHEAD = 2
"""Tiles of a strip that are prefetched, if shared memory holds them; one if registers are few."""
SHARED_BYTES = 100 * 1024
"""Shared memory of a program: a little less than half of an H200's, so that a multiprocessor holds two."""
LEAST_SHARED_BYTES = 48 * 1024
"""Shared memory that every program may use; PyTorch does not report it for AMD GPUs."""
REDUCTION_BYTES = 32 * 1024
"""Share of a program's shared memory for reductions and layout conversions."""
MOST_PARTS = 512
"""Partial sums of a column that a program loads at once: one round trip to memory and one reduction for all of them."""
MANY_LOADS = 6
"""Loads per element above which a thread has eight elements, not sixteen: a max pool's gradient took 219 registers."""
COLUMN_REGISTERS = 200
"""Registers of a thread for the values that it keeps of its columns."""


@dataclass(frozen=True)
class Blocking:
    """How many programs run, over which blocks. Sizes are named as the kernel's parameters are."""

    programs: int
    sizes: dict[str, int]
    warps: int
    after_programs: int = 0
    after_sizes: dict[str, int] | None = None
    scratch: tuple[tuple[int, str], ...] = ()
    """Elements and dtype of each buffer between the first kernel and the second."""


def plan(nest: Nest, processors: int, tile: int = TILE, shared_bytes: int = SHARED_BYTES) -> Blocking:
    """Block sizes for a device of so many multiprocessors; `tile` is the elements of a block.

    `shared_bytes`: what tiles on their way may take of a program's shared memory.
    """
    schedule = TritonSchedule(nest)
    rows, columns = nest.row_count, nest.col_count
    if schedule.kind == "flat":
        block = min(power_of_two(columns), tile)
        return Blocking(-(-columns // block), {"BLOCK": block}, 4)
    if schedule.kind == "tiles":
        tile *= _rows_that_share(nest, processors * PER_PROCESSOR * tile)
        block_cols = block_width(columns, 64 if nest.transposes else tile)
        block_rows = min(power_of_two(rows), max(tile // block_cols, 1))
        programs = -(-rows // block_rows) * -(-columns // block_cols)
        return Blocking(programs, {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols}, 4)
    if schedule.sums:
        return _in_strips(nest, schedule, processors, tile, shared_bytes)
    block_cols = power_of_two(columns) if schedule.whole_row else LONG_BLOCK
    fewest = _rows_of_sectors(schedule, block_cols) if nest.transposes and schedule.whole_row else 1
    block_rows = min(power_of_two(rows), max(tile // block_cols, fewest))
    warps = min(max(block_rows * block_cols // 512, 4), 16)
    return Blocking(-(-rows // block_rows), {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols}, warps)


def _rows_of_sectors(schedule: TritonSchedule, block_cols: int) -> int:
    """Rows of a program where rows are the contiguous axis: neighbouring rows share sectors of 32 bytes.

    Layer norm of Whisper's residual stream, which lies as its convolution left it, took 64 us of 98 MB in two rows.
    """
    held = max(block_cols * schedule.registers_per_column, 1)
    return max(min(SECTOR, power_of_two(REGISTERS // held + 1) // 2), 1)


def _rows_that_share(nest: Nest, fewest: int) -> int:
    """The factor for a block's rows if values vary with columns alone and there are at least `fewest` elements.

    A thread loads and computes them once for its rows. Batch norm at inference with a SiLU, 802,816 rows of 96 columns
    in bf16, where a copy takes 73 us: with one row for each thread 258 us, two 158, four 127. In training, where the
    root was taken before, 64 columns: 90, 74, 74; and 200,704 rows of 144: 53, 63, 65.
    """
    of_columns = [step for step in nest.steps if step.level is Level.COL]
    if nest.transposes or nest.row_count * nest.col_count < fewest:
        return 1
    if any(step.name in SLOW for step in of_columns):
        return 4
    return 2 if sum(step.name == "load" for step in of_columns) >= MANY_COLUMN_VALUES else 1


def _repeats(nest: Nest, access: Access) -> bool:
    """Whether neighbours along the columns read one element: copied ahead of time, each thread would copy four bytes.

    Six moments for each sample and group of 16 channels in the gradient of a group norm, 2,097,152 elements: 107 us.
    """
    _, columns = nest.split(access.strides)
    return nest.cols[-1] > 1 and columns[-1] == 0


def _in_strips(nest: Nest, schedule: TritonSchedule, processors: int, tile: int, shared_bytes: int) -> Blocking:
    """Column sums: each program loops over a strip of rows and prefetches the next tiles.

    H200, bf16, 16384 rows: the derivative of GELU and its sums, 8192 columns, 223 us (192 at the bandwidth of copies),
    by whole rows one at a time 361; that of layer norm, 2048 columns, 86 us (64), in tiles of one row 110, one at a
    time 151.
    """
    rows, columns = nest.row_count, nest.col_count
    wide = power_of_two(columns) if schedule.whole_row else LONG_BLOCK
    accesses = [s.access for s in nest.steps if s.name == "load" and s.access and s.level is Level.FULL]
    loads, repeats = [access.buffer for access in accesses], any(_repeats(nest, access) for access in accesses)
    # Of rows too long to hold, and of which a number alone is kept: as many programs as without a sum.
    is_number = not schedule.whole_row and all(nest.steps[i].level is Level.SCALAR for i in schedule.sums)
    if is_number:
        block_rows, block_cols, elements, warps = 1, wide, wide, max(wide // 512, 4)
    elif schedule.splits_columns:
        # Each element has an accumulator for each sum, and a register or two for each load.
        many = len(schedule.sums) > 2 or len(loads) > MANY_LOADS
        each = 4 if repeats else 8 if many else 16
        widest = max(each // 4 * tile // power_of_two(rows), LEAST_COLUMNS) if schedule.has_few_rows else tile
        block_cols = block_width(columns, widest)
        block_rows = min(power_of_two(rows), max(each // 4 * tile // block_cols, 2))
        elements = block_rows * block_cols
        warps = max(elements // (each * WARP), 1)
    else:
        block_cols = wide
        # Two rows share the barriers of one reduction.
        block_rows = min(power_of_two(rows), max(4 * tile // block_cols, 1 if block_cols > 4 * tile else 2))
        elements = block_rows * block_cols
        # 32 elements a thread, or as many columns as it has registers for.
        warps = max(
            elements // (32 * WARP),
            power_of_two(-(-block_cols * schedule.registers_per_column // (COLUMN_REGISTERS * WARP))),
            1,
        )
    across = -(-columns // block_cols) if schedule.splits_columns else 1
    tiles = -(-rows // block_rows)
    waves = PER_PROCESSOR if is_number else WAVES
    most = 1 if schedule.one_strip else max(waves * processors // across, 1)
    strip = -(-tiles // min(tiles, most))
    strips = -(-tiles // strip)
    on_their_way = elements * sum(getattr(torch, nest.buffers[place].dtype).itemsize for place in loads)
    deepest = MOST_AHEAD if wide * schedule.registers_per_column <= REGISTERS or schedule.splits_columns else 1
    ahead = 1 + min(deepest, shared_bytes // max(on_their_way, 1)) if schedule.whole_row and not repeats else 1
    sizes = {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols, "TILES": strip, "AHEAD": ahead}
    if schedule.one_strip:
        return Blocking(across, sizes, min(warps, 16))
    after = {
        "PARTS": strips,
        "BLOCK_PARTS": min(power_of_two(strips), MOST_PARTS),
        "BLOCK_COLS": min(power_of_two(columns), 8),
    }
    after_programs = -(-columns // after["BLOCK_COLS"]) if schedule.late_columns else 1
    scratch = tuple(schedule.scratch_size(i, strips) for i in schedule.scratch)
    return Blocking(strips * across, sizes, min(warps, 16), after_programs, after, scratch)
