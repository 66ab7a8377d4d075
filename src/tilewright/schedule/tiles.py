"""Tiles and warps of a GPU's programs where no sum runs over the rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tilewright.loops.nest import Level, Nest
from tilewright.schedule.blocks import block_width, power_of_two
from tilewright.schedule.facts import NARROW, WARP
from tilewright.schedule.places import REGISTERS, Places
from tilewright.schedule.schedule import Axis, Schedule

TILE = 1024
"""Elements of a block on a GPU: eight for each thread of four warps."""
SHARED_BYTES = 100 * 1024
"""Shared memory of a program: a little less than half of an H200's, so that two fit a multiprocessor."""
REDUCTION_BYTES = 32 * 1024
"""The part of a program's shared memory for reductions and layout conversions."""
PER_PROCESSOR = 16
"""With more programs per multiprocessor than this, larger and fewer programs are balanced as well."""
SLOW = frozenset({"rsqrt", "sqrt", "div", "exp", "log", "tanh", "erf", "pow", "sigmoid"})
"""Functions that take many times as long as a multiplication."""
MANY_COLUMN_VALUES = 2
"""Loads of column values that two rows of a thread share: a factor and a summand of the columns of [16, 4,194,304] in
fp32 take 189 µs on an H200, one row a thread 245; a bias, a tanh and a factor of 8,258,048 × 64 in bf16 506, 564."""
SECTOR = 16
"""16-bit elements of a 32-byte sector, the unit of memory traffic."""
SMALL_TILE = 16384
"""Elements up to which a tile of short rows has two sectors in a row, as DRAM has, and a warp has 1024 (2048 of more
than 4096), so that few share a reduction. Softmax over the 64 channels of 64 x 64 x 65536: 311 µs on an H200 in bf16,
575 in fp32; with one sector 406 and 633. With a bias and a sigmoid in fp32: 293 µs, with 2048 elements a warp 439. Over
256 of 64 x 256 x 16384 in bf16: 278, with one sector in 8 warps 459; their layer norm: 277, in 16 warps 553."""
SHORT_ROW = 1024
"""Columns of a row that one warp may hold alone."""
TRANSPOSED_TILE = 4096
"""Elements of a tile of a large nest that reads along the rows and writes along the columns, or the reverse: a program
has 64 bytes or more in a row of each. H200, bf16: 16 x 64 x 262,144 to channels-last 306 µs, with 1024 elements 321
(fp32: 566, 652)."""
TRANSPOSED_BYTES = 512
"""Of such a tile's row if it is not whole; 32 elements a thread. To contiguous on an H200: a copy of 8 x 64 x 1,052,676
in bf16 takes 620 µs, with 256 bytes 685; bias, minimum and factors of 128 x 126 x 126 x 128 270, 303; with 16 elements
a thread 285. 512 x 14 x 14 x 1024: rows of 256 columns 171 µs, of 32 508."""
WHOLE_COLUMNS = 256
"""The longest row of such a tile that may be whole."""
TRANSPOSED_ROWS = 64
"""A row of 192 columns in tiles of 64, not 256, with 32 rows: 211 µs, 383."""
FEWEST_READERS = 3
"""Loads of one buffer that make windows."""
WINDOWED_TILE = 512
"""Elements of a block that reads such windows without a stride. Pooling by 8 of 12288 rows of 65536, stride 1, bf16:
2,644 µs on an H200, with 1024 elements 3,600."""
MANY_READERS = 16
"""With more loads of one buffer a thread has half the elements; so it has of elements of four bytes that windows move
along the columns, between vectors, if any load has a condition. Pooling by 4 × 4 of 2048 images of 512 × 512, stride 1,
padded, in fp32 takes 2,309 µs on an H200 with two elements a thread, 3,701 with four; by 3 × 3 × 3 with a stride of 2
and dilation 1,462 with one, 2,118 with two. So has one that reduces rows in registers: a depthwise convolution by 5 × 5
with its mean, 64 x 960 x 7 x 7 in bf16, takes 46 µs with four elements a thread, 363 with the 32 of a warp's rows,
which spill; by 3 × 3 the 32 are faster: 64 x 672 x 14 x 14 takes 37 µs, with four 44."""
STRIDED_TILE = 256
"""Elements of a block that reads windows with a stride, two for each thread of four warps: with eight, other loads
evict the sectors that neighbouring windows share from the first-level cache before they are read again. Pooling by
2 × 2 × 2 of 268 million fp32 values: 1,112 µs on an H200 with eight, 542 with four, 281 with one."""
SCANNED_COLUMNS = 4096
"""Columns of a block of a long row along which a scan runs. Cumulative sums of 32768 masked rows of 32768 columns in
fp32 take 2,447 µs on an H200, in blocks of 16,384 columns 3,337."""
SUMMED_COLUMNS = 4096
"""Columns of a block of many long rows that are read once: several programs hide each other's waits. The means of 8192
rows of 64,516 GELUs in bf16 take 362 µs on an H200, in blocks of 16,384 columns 514; in fp32 515, 589."""
LONG_ROW_WARPS = 32
"""Warps of a program for such a row without column sums: the L2 cache then holds the few rows in flight for the next
pass. Log-softmax of 8192 rows of 32000 columns, bf16, takes 301 us on an H200, in four warps 555, in sixteen 328."""


@dataclass(frozen=True)
class Limits:
    """What bounds the programs on a device: multiprocessors, elements of a block, bytes of prefetched tiles."""

    processors: int = 132
    tile: int = TILE
    shared_bytes: int = SHARED_BYTES

    @classmethod
    def of(cls, processors: int, shared_bytes: int) -> Limits:
        """Of a device whose programs may have so much shared memory."""
        return cls(processors, shared_bytes=max(min(SHARED_BYTES, shared_bytes - REDUCTION_BYTES), 0))


def flat(places: Places, limits: Limits) -> Schedule:
    """Elementwise along one axis."""
    columns, tile = places.nest.col_count, limits.tile
    # A program that draws starts with 50 further instructions, so give a thread up to four vectors.
    vectors = max((step.philox.vector for step in places.nest.steps if step.philox), default=0) // 2
    tile *= power_of_two(min(columns // (limits.processors * PER_PROCESSOR * tile), vectors))
    block = min(power_of_two(columns), tile)
    return Schedule(Axis(1), Axis(block), -(-columns // block))


def tiles(places: Places, limits: Limits) -> Schedule:
    """Elementwise over rows × columns."""
    nest, tile, warps = places.nest, limits.tile, 4
    rows, columns, programs = nest.row_count, nest.col_count, limits.processors * PER_PROCESSOR
    if nest.transposes and tile == TILE and rows * columns >= programs * TRANSPOSED_TILE:
        tile, block_cols, warps = _transposed_tile(places)
    else:
        tile = _windowed_tile(places) if tile == TILE and not nest.transposes else tile
        block_cols = block_width(columns, 64 if nest.transposes else tile)
        tile *= _rows_that_share(nest, programs * tile)
    block_rows = min(power_of_two(rows), max(tile // block_cols, 1))
    programs = -(-rows // block_rows) * -(-columns // block_cols)
    return Schedule(Axis(block_rows), Axis(block_cols), programs, warps, order=places.order)


def rows_in_registers(places: Places, limits: Limits) -> Schedule:
    """Whole rows, in several blocks where their length is no power of two."""
    nest, (pieces, width), wide = places.nest, places.row_blocks, places.row_lanes
    fewest = _rows_of_sectors(places, wide) if nest.transposes else 1
    are_wide = _most_read(places)[1] > MANY_READERS and not nest.transposes
    tile = min(limits.tile, _windowed_tile(places)) if are_wide else limits.tile
    block_rows = min(power_of_two(nest.row_count), power_below(max(tile // wide, fewest)))
    programs = -(-nest.row_count // block_rows)
    elements, are_many = block_rows * wide, programs >= PER_PROCESSOR * limits.processors
    if tile < limits.tile:
        warps = min(max(4 * elements // tile, 1), 16)
    elif elements <= SHORT_ROW and are_many:
        # One warp needs no barrier, and fewer exchanges between threads for each row.
        warps = 1
    elif nest.transposes and elements <= SMALL_TILE and are_many:
        held = 32 if elements <= TRANSPOSED_TILE else 64
        warps = min(max(power_of_two(elements * max(len(places.tile_loads), 1) // (held * WARP)), 1), 16)
    else:
        warps = most_warps(min(max(power_below(elements // 512), 4), 16), block_rows * width)
    return Schedule(Axis(block_rows), Axis(width, "registers", pieces), programs, warps)


def rows_in_loop(places: Places, limits: Limits) -> Schedule:
    """Rows too long for registers, one a program."""
    nest, warps = places.nest, LONG_ROW_WARPS
    # The loads of a thread take at most 32 registers.
    width = warps * WARP * (16 if places.registers_per_looped_column <= 2 else 8)
    short = places.cuts_columns and nest.cols[-1] < 2 * SUMMED_COLUMNS
    if places.scans:
        width, warps = SCANNED_COLUMNS, SCANNED_COLUMNS // (16 * WARP)
    elif places.loops_once and not short and nest.row_count >= 4 * limits.processors:
        width, warps = SUMMED_COLUMNS, SUMMED_COLUMNS // (16 * WARP)
    elif places.cuts_columns:
        width = min(width, places.loop_widths[0])
    return Schedule(Axis(1), Axis(width, "loop", places.column_blocks(width)), nest.row_count, warps)


def _transposed_tile(places: Places) -> tuple[int, int, int]:
    """Elements, columns and warps of a tile that transposes a large nest."""
    columns = places.nest.col_count
    if columns > WHOLE_COLUMNS:
        widest = max(places.itemsize(store.access) for store in places.nest.stores)
        width = min(TRANSPOSED_BYTES // widest, WHOLE_COLUMNS)
        return TRANSPOSED_ROWS // 2 * width, width, width // WARP
    whole = power_of_two(columns)
    if columns % (TRANSPOSED_ROWS // 2) or whole <= columns + columns // 8:
        return TRANSPOSED_TILE, whole, 8
    width = block_width(columns, TRANSPOSED_ROWS)
    return TRANSPOSED_ROWS // 2 * width, width, 4


def _windowed_tile(places: Places) -> int:
    """Elements of a block, fewer if several loads read the same elements of a buffer for neighbouring results."""
    nest, loads = places.nest, places.tile_loads
    strided = [access.buffer for access in loads if not access.by and abs(access.strides[-1]) > 1]
    if len(set(strided)) < len(strided):
        return STRIDED_TILE // 2 if max(Counter(strided).values()) > MANY_READERS else STRIDED_TILE
    windows = [access for access in loads if not access.by]
    buffer, most = _most_read(places)
    if most < FEWEST_READERS:
        return TILE
    is_masked = any(s.name == "load" and s.args for s in nest.steps)
    moved = len({access.offset % 4 for access in windows if access.buffer == buffer}) > 1
    wide = nest.buffers[buffer].dtype not in NARROW
    return WINDOWED_TILE // 2 if wide and moved and (is_masked or most > MANY_READERS) else WINDOWED_TILE


def _most_read(places: Places) -> tuple[int, int]:
    """The buffer that most loads of a tile read, without gathers, and how many they are."""
    found = Counter(access.buffer for access in places.tile_loads if not access.by)
    return found.most_common(1)[0] if found else (0, 0)


def power_below(count: int) -> int:
    """The largest power of two that is at most `count`."""
    return power_of_two(count + 1) // 2


def most_warps(warps: int, elements: int) -> int:
    """At most `warps`, so that each thread has four neighbouring elements of a block of `elements`."""
    return min(warps, max(elements // (4 * WARP), 1))


def _rows_of_sectors(places: Places, block_cols: int) -> int:
    """Rows of a program if the rows are the contiguous axis: neighbouring rows share 32-byte sectors.

    Two rows a program: the layer norm of Whisper's residual stream (a convolution's layout, 98 MB) took 64 µs.
    """
    held = max(block_cols * places.registers_per_column, 1)
    widest = 2 * SECTOR if 2 * SECTOR * block_cols <= SMALL_TILE else SECTOR
    return max(min(widest, power_of_two(REGISTERS // held + 1) // 2), 1)


def _rows_that_share(nest: Nest, fewest: int) -> int:
    """The factor of a block's rows if some values vary with columns alone and there are `fewest` elements.

    A thread loads and computes column values once for all its rows. Batch norm with SiLU in bf16 on an H200, µs with
    1, 2 and 4 rows a thread: inference, 802,816 × 96: 258, 158, 127 (a copy takes 73); training (the root is known),
    802,816 × 64: 90, 74, 74; 200,704 × 144: 53, 63, 65.
    """
    of_columns = [step for step in nest.steps if step.level is Level.COL]
    if nest.transposes or nest.row_count * nest.col_count < fewest:
        return 1
    if any(step.name in SLOW for step in of_columns):
        return 4
    return 2 if sum(step.name == "load" for step in of_columns) >= MANY_COLUMN_VALUES else 1
