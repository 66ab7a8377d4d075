"""Tiles, strips and warps of a GPU's programs with sums over the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.loops.nest import Access, Level, Nest
from tilewright.schedule.blocks import block_width, power_of_two
from tilewright.schedule.facts import WARP, accumulator_beside, accumulator_dtype
from tilewright.schedule.places import REGISTERS, Places
from tilewright.schedule.schedule import Axis, Combination, Schedule
from tilewright.schedule.tiles import PER_PROCESSOR, Limits, most_warps, power_below

LEAST_COLUMNS = 32
"""The fewest columns of a program that owns all rows: two sectors of 16-bit elements."""
SINGLE_COLUMNS = 128
"""Columns of a block that is loaded element by element: all loads of 64 rows are in flight. The mean over a middle axis
of [128, 4096, 4095] in bf16 takes 1,154 µs on an H200, in blocks of 16 rows 2,904; in fp32, prefetched, 2,071."""
SINGLE_WAVES = 6
"""Programs of such blocks per multiprocessor if each owns a strip of rows."""
LONG_BLOCK = 2048
"""Columns of a block of a row that is too long for registers, beside column sums."""
MOST_TILES = 64
"""Tiles of whole rows in a strip whose sums accumulate in fp32; the sums of strips are added in double."""
WAVES = 2
"""Programs per multiprocessor if each owns a strip of rows."""
FULL = 3 * REGISTERS // 4
"""A program with more registers than this has its multiprocessor to itself."""
MOST_AHEAD = 2
"""Tiles of a strip that are prefetched if shared memory holds them; one if registers are scarce."""
MOST_PARTS = 512
"""Partial sums of a column that a program loads at once, in one round trip to memory, and reduces together."""
MANY_LOADS = 6
"""With more loads per element, a thread has eight elements instead of sixteen: a max pool's gradient took 219
registers."""
COLUMN_REGISTERS = 200
"""Registers of a thread for the column values that it keeps."""


def _repeats(nest: Nest, accesses: Sequence[Access]) -> bool:
    """Whether an element is read again: by neighbours along the columns, or by several loads at computed places.

    A prefetch would copy it once for each reader, in the first case four bytes at a time, in the second from L2.
    Six moments for each sample and group of 16 channels in the gradient of a group norm, 2,097,152 elements: 107 us.
    The gradient of a pooling whose windows overlap, with that of the batch norm before it, 51 million elements: 547 us.
    """
    across = [nest.split(access.strides)[1] for access in accesses]
    gathered = [access.buffer for access in accesses if access.by]
    return len(set(gathered)) < len(gathered) or (nest.cols[-1] > 1 and any(columns[-1] == 0 for columns in across))


def strips(places: Places, limits: Limits) -> Schedule:
    """Column sums: each program loops over a strip of rows and prefetches the next tiles.

    H200, bf16, 16384 rows: GELU's derivative and its sums, 8192 columns: 223 µs (192 at the bandwidth of a copy), one
    whole row at a time 361. Layer norm's derivative, 2048 columns: 86 µs (64), in tiles of one row 110, one row at a
    time 151.
    """
    nest, in_loop = places.nest, places.columns == "loop"
    wide, repeats = LONG_BLOCK if in_loop else places.row_lanes, _repeats(nest, places.tile_loads)
    # If rows are too long for registers and each sum is one number, use as many programs as without a sum.
    is_number = in_loop and all(nest.steps[i].level is Level.SCALAR for i in places.sums)
    if is_number:
        # Four elements a thread: 471 µs for a hinge loss of 32768² in bf16 on an H200, with sixteen 603.
        block_rows, cols, warps = 1, Axis(wide, "loop"), max(wide // 128, 4)
    elif places.splits_columns:
        block_rows, cols, warps = _tile_of_columns(places, limits.tile, repeats)
    else:
        block_rows, cols, warps = _tile_of_rows(places, wide, limits.tile)
    across = places.column_blocks(cols.tile) if places.splits_columns else 1
    registers = wide * places.registers_per_column
    fills = cols.place == "registers" and registers > FULL
    waves = PER_PROCESSOR if is_number else 1 if fills else SINGLE_WAVES if places.loads_singly else WAVES
    tiles = -(-nest.row_count // block_rows)
    most = 1 if places.one_strip else max(waves * limits.processors // across, 1)
    strip = -(-tiles // min(tiles, most))
    sums = [nest.steps[i] for i in places.sums]
    if any(accumulator_beside(step, cols) != accumulator_dtype(step) for step in sums):
        strip = min(strip, MOST_TILES)
    tile_bytes = block_rows * cols.owned * sum(map(places.itemsize, places.tile_loads))
    deepest = MOST_AHEAD if registers <= REGISTERS or places.splits_columns else 1
    prefetches = not (in_loop or repeats or places.loads_singly)
    stages = 1 + min(deepest, limits.shared_bytes // max(tile_bytes, 1)) if prefetches else 1
    combination = None if places.one_strip else _combination(places, cols, -(-tiles // strip))
    if in_loop:
        cols = replace(cols, blocks=places.column_blocks(cols.tile))
    programs = across * (combination.parts if combination else 1)
    rows = Axis(block_rows, "loop", strip)
    return Schedule(rows, cols, programs, min(warps, 16), stages, combination=combination)


def _combination(places: Places, cols: Axis, parts: int) -> Combination:
    """The kernel that adds the sums of `parts` strips."""
    nest = places.nest
    columns = min(power_of_two(nest.col_count), 8)
    programs = -(-nest.col_count // columns) if places.late_columns else 1
    sums = [(nest.steps[i], nest.col_count if nest.steps[i].level is Level.COL else 1) for i in places.sums]
    scratch = [(parts * width, accumulator_beside(step, cols)) for step, width in sums]
    scratch += [(1, nest.steps[i].dtype) for i in places.late_scalars]
    return Combination(programs, parts, min(power_of_two(parts), MOST_PARTS), columns, tuple(scratch))


def _tile_of_columns(places: Places, tile: int, repeats: bool) -> tuple[int, Axis, int]:
    """Rows, columns and warps of a tile whose program owns some of the columns."""
    nest, single = places.nest, places.loads_singly
    # Each element needs an accumulator per sum, and one or two registers per load.
    many = len(places.sums) > 2 or len(places.tile_loads) > MANY_LOADS
    each = 4 if repeats else 8 if many else 16
    rows = power_of_two(nest.row_count)
    widest = max(each // 4 * tile // rows, LEAST_COLUMNS) if places.has_few_rows else tile
    columns = nest.cols[-1] if places.cuts_columns else nest.col_count
    block_cols = block_width(columns, SINGLE_COLUMNS if single else widest)
    # Many loads in flight, since each brings one element.
    block_rows = min(rows, max(each // 4 * (2 if single else 1) * tile // block_cols, 2))
    # Sums over 16 images of 64 x 64 x 128 in bf16: 13 to 14 µs on an H200, with 16 elements a thread 20 to 21.
    held = 32 if each == 16 and not single else each
    return block_rows, Axis(block_cols), max(block_rows * block_cols // (held * WARP), 1)


def _tile_of_rows(places: Places, wide: int, tile: int) -> tuple[int, Axis, int]:
    """Rows, columns and warps of a tile whose program owns all columns: `wide` ones, in pieces where they are many, or
    blocks of so many in a loop."""
    in_loop = places.columns == "loop"
    cols = Axis(wide, "loop") if in_loop else Axis(places.row_blocks[1], "registers", places.row_blocks[0])
    # Two rows share the barriers of one reduction; rows in pieces would be in different warps.
    fewest = 1 if wide > 4 * tile or cols.blocks > 1 else 2
    block_rows = min(power_of_two(places.nest.row_count), power_below(max(4 * tile // wide, fewest)))
    # 32 elements a thread, or fewer if its columns need more registers.
    warps = max(
        power_of_two(-(-block_rows * wide // (32 * WARP))),
        power_of_two(-(-wide * places.registers_per_column // (COLUMN_REGISTERS * WARP))),
    )
    return block_rows, cols, most_warps(warps, block_rows * cols.tile) if cols.blocks > 1 else warps
