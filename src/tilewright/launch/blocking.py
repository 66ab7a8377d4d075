"""Chooses programs, block sizes, warps and scratch of a generated Triton kernel from its nest and the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tilewright.emit.triton_schedule import NARROW, REGISTERS, SHORT_ROW, TritonSchedule, accumulator_dtype
from tilewright.launch.triton import WARP
from tilewright.loops.blocks import block_width, power_of_two
from tilewright.loops.nest import Access, Level, Nest

TILE = 1024
"""Elements of a block on a GPU: eight for each thread of four warps."""
INTERPRETED_TILE = 16384
"""The interpreter's time depends on the number of programs and operations, hardly on elements."""
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
LEAST_COLUMNS = 32
"""The fewest columns of a program that owns all rows: two sectors of 16-bit elements."""
SINGLE_COLUMNS = 128
"""Columns of a block that is loaded element by element: all loads of 64 rows are in flight. The mean over a middle axis
of [128, 4096, 4095] in bf16 takes 1,154 µs on an H200, in blocks of 16 rows 2,904; in fp32, prefetched, 2,071."""
SINGLE_WAVES = 6
"""Programs of such blocks per multiprocessor if each owns a strip of rows."""
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
and dilation 1,462 with one, 2,118 with two."""
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
LONG_BLOCK = 2048
"""Columns of a block of a row that is too long for registers, beside column sums."""
LONG_ROW_WARPS = 32
"""Warps of a program for such a row without column sums: the L2 cache then holds the few rows in flight for the next
pass. Log-softmax of 8192 rows of 32000 columns, bf16, takes 301 us on an H200, in four warps 555, in sixteen 328."""
MOST_TILES = 64
"""Tiles of whole rows in a strip whose sums accumulate in fp32; the sums of strips are added in double."""
WAVES = 2
"""Programs per multiprocessor if each owns a strip of rows."""
FULL = 3 * REGISTERS // 4
"""A program with more registers than this has its multiprocessor to itself."""
MOST_AHEAD = 2
"""Tiles of a strip that are prefetched if shared memory holds them; one if registers are scarce."""
SHARED_BYTES = 100 * 1024
"""Shared memory of a program: a little less than half of an H200's, so that two fit a multiprocessor."""
LEAST_SHARED_BYTES = 48 * 1024
"""Shared memory available to every program; PyTorch does not report the limit of AMD GPUs."""
REDUCTION_BYTES = 32 * 1024
"""The part of a program's shared memory for reductions and layout conversions."""
MOST_PARTS = 512
"""Partial sums of a column that a program loads at once, in one round trip to memory, and reduces together."""
MANY_LOADS = 6
"""With more loads per element, a thread has eight elements instead of sixteen: a max pool's gradient took 219
registers."""
COLUMN_REGISTERS = 200
"""Registers of a thread for the column values that it keeps."""


@dataclass(frozen=True)
class Blocking:
    """How many programs run over which blocks; sizes by the names of the kernel's parameters."""

    programs: int
    sizes: dict[str, int]
    warps: int
    after_programs: int = 0
    after_sizes: dict[str, int] | None = None
    scratch: tuple[tuple[int, str], ...] = ()
    """Elements and dtype of each buffer between the first kernel and the second."""

    def __str__(self) -> str:
        sizes = {**self.sizes, "warps": self.warps}
        return f"{self.programs} × " + " ".join(f"{name.lower()}={size}" for name, size in sizes.items())


def candidates(nest: Nest, processors: int, tile: int = TILE, shared_bytes: int = SHARED_BYTES) -> dict[str, Blocking]:
    """Launches of one kernel by their text, that of `plan` first: with half and twice its tile, wider and narrower
    tiles of a transposition, its programs of a strip, the columns of its loop over a long row, and its warps."""
    schedule = TritonSchedule(nest)
    asked = [(processors, tile), (processors, tile // 2), (processors, 2 * tile)]
    asked += [(max(processors // 2, 1), tile), (2 * processors, tile)] if schedule.sums else []
    found = [plan(nest, *one, shared_bytes) for one in asked]
    if schedule.kind == "tiles":
        found += _other_tiles(nest, found[0].sizes)
    if schedule.is_looped:
        sizes = found[0].sizes
        widths = sizes["BLOCK_COLS"] // 2, 2 * sizes["BLOCK_COLS"]
        found += [replace(found[0], sizes={**sizes, "BLOCK_COLS": width}) for width in widths]
    found += [replace(one, warps=n) for one in found for n in (one.warps // 2, 2 * one.warps) if 1 <= n <= 32]
    return {str(one): one for one in found}


def _other_tiles(nest: Nest, sizes: Mapping[str, int]) -> Iterator[Blocking]:
    """Tiles of half, once and twice the elements in other forms."""
    rows, columns = power_of_two(nest.row_count), power_of_two(nest.col_count)
    for wide in (-2, -1, 0, 1, 2):
        for high in (-2, -1, 0, 1, 2):
            if abs(wide + high) > 1:
                continue
            block_rows, block_cols = (int(sizes[n] * 2.0**by) for n, by in (("BLOCK_ROWS", high), ("BLOCK_COLS", wide)))
            if 1 <= block_rows <= rows and 1 <= block_cols <= columns:
                programs = -(-nest.row_count // block_rows) * -(-nest.col_count // block_cols)
                masked = int(nest.row_count % block_rows != 0 or bool(nest.argument_dtypes))
                changed = {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols, "MASKED_ROWS": masked}
                yield Blocking(programs, {**sizes, **changed}, max(min(block_rows * block_cols // (16 * WARP), 16), 1))


def plan(nest: Nest, processors: int, tile: int = TILE, shared_bytes: int = SHARED_BYTES) -> Blocking:
    """The launch of a nest's kernel on a device with this many multiprocessors; `tile` is the elements of a block.

    `shared_bytes` bounds the shared memory of a program's prefetched tiles.
    """
    found = _plan(nest, TritonSchedule(nest), processors, tile, shared_bytes)
    if nest.rows and "BLOCK_ROWS" in found.sizes:
        # A program that owns too many rows masks those beyond the last.
        owned = found.sizes["BLOCK_ROWS"] * found.sizes.get("TILES", 1)
        found.sizes["MASKED_ROWS"] = int(nest.row_count % owned != 0 or bool(nest.argument_dtypes))
    return found


def _plan(nest: Nest, schedule: TritonSchedule, processors: int, tile: int, shared_bytes: int) -> Blocking:
    rows, columns = nest.row_count, nest.col_count
    if schedule.kind == "flat":
        # A program that draws starts with 50 further instructions, so give a thread up to four vectors.
        vectors = max((step.philox.vector for step in nest.steps if step.philox), default=0) // 2
        tile *= power_of_two(min(columns // (processors * PER_PROCESSOR * tile), vectors))
        block = min(power_of_two(columns), tile)
        return Blocking(-(-columns // block), {"BLOCK": block}, 4)
    if schedule.kind == "tiles":
        return _in_tiles(nest, processors, tile)
    if schedule.sums:
        return _in_strips(nest, schedule, processors, tile, shared_bytes)
    if not schedule.whole_row:
        if schedule.scans:
            return Blocking(rows, {"BLOCK_ROWS": 1, "BLOCK_COLS": SCANNED_COLUMNS}, SCANNED_COLUMNS // (16 * WARP))
        # The loads of a thread take at most 32 registers.
        cut = schedule.cuts_columns and nest.cols[-1] < 2 * SUMMED_COLUMNS
        if schedule.loops_once and not cut and rows >= 4 * processors:
            return Blocking(rows, {"BLOCK_ROWS": 1, "BLOCK_COLS": SUMMED_COLUMNS}, SUMMED_COLUMNS // (16 * WARP))
        block_cols = LONG_ROW_WARPS * WARP * (16 if schedule.registers_per_looped_column <= 2 else 8)
        if schedule.cuts_columns:
            block_cols = min(block_cols, schedule.loop_widths[0])
        return Blocking(rows, {"BLOCK_ROWS": 1, "BLOCK_COLS": block_cols}, LONG_ROW_WARPS)
    wide = schedule.row_lanes
    block_cols = wide // schedule.pieces
    fewest = _rows_of_sectors(schedule, wide) if nest.transposes else 1
    block_rows = min(power_of_two(rows), _power_below(max(tile // wide, fewest)))
    programs = -(-rows // block_rows)
    elements = block_rows * wide
    if elements <= SHORT_ROW and programs >= PER_PROCESSOR * processors:
        # One warp needs no barrier, and fewer exchanges between threads for each row.
        warps = 1
    elif nest.transposes and elements <= SMALL_TILE and programs >= PER_PROCESSOR * processors:
        loads = sum(step.name == "load" and step.level is Level.FULL for step in nest.steps)
        held = 32 if elements <= TRANSPOSED_TILE else 64
        warps = min(max(power_of_two(elements * max(loads, 1) // (held * WARP)), 1), 16)
    else:
        warps = _most_warps(min(max(_power_below(elements // 512), 4), 16), block_rows * block_cols)
    return Blocking(programs, {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols}, warps)


def _in_tiles(nest: Nest, processors: int, tile: int) -> Blocking:
    """Elementwise over rows × columns."""
    rows, columns, warps = nest.row_count, nest.col_count, 4
    if nest.transposes and tile == TILE and rows * columns >= processors * PER_PROCESSOR * TRANSPOSED_TILE:
        tile, block_cols, warps = _transposed_tile(nest)
    else:
        tile = _windowed_tile(nest) if tile == TILE and not nest.transposes else tile
        block_cols = block_width(columns, 64 if nest.transposes else tile)
        tile *= _rows_that_share(nest, processors * PER_PROCESSOR * tile)
    block_rows = min(power_of_two(rows), max(tile // block_cols, 1))
    programs = -(-rows // block_rows) * -(-columns // block_cols)
    return Blocking(programs, {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols}, warps)


def _transposed_tile(nest: Nest) -> tuple[int, int, int]:
    """Elements, columns and warps of a tile that transposes a large nest."""
    columns = nest.col_count
    if columns > WHOLE_COLUMNS:
        widest = max(getattr(torch, nest.buffers[store.access.buffer].dtype).itemsize for store in nest.stores)
        width = min(TRANSPOSED_BYTES // widest, WHOLE_COLUMNS)
        return TRANSPOSED_ROWS // 2 * width, width, width // WARP
    whole = power_of_two(columns)
    if columns % (TRANSPOSED_ROWS // 2) or whole <= columns + columns // 8:
        return TRANSPOSED_TILE, whole, 8
    width = block_width(columns, TRANSPOSED_ROWS)
    return TRANSPOSED_ROWS // 2 * width, width, 4


def _windowed_tile(nest: Nest) -> int:
    """Elements of a block, fewer if several loads read the same elements of a buffer for neighbouring results."""
    loads = [s.access for s in nest.steps if s.name == "load" and s.access and s.level is Level.FULL]
    strided = [access.buffer for access in loads if not access.by and abs(access.strides[-1]) > 1]
    if len(set(strided)) < len(strided):
        return STRIDED_TILE // 2 if max(Counter(strided).values()) > MANY_READERS else STRIDED_TILE
    windows = [access for access in loads if not access.by]
    buffer, most = Counter(access.buffer for access in windows).most_common(1)[0] if windows else (0, 0)
    if most < FEWEST_READERS:
        return TILE
    is_masked = any(s.name == "load" and s.args for s in nest.steps)
    moved = len({access.offset % 4 for access in windows if access.buffer == buffer}) > 1
    wide = nest.buffers[buffer].dtype not in NARROW
    return WINDOWED_TILE // 2 if wide and moved and (is_masked or most > MANY_READERS) else WINDOWED_TILE


def _power_below(count: int) -> int:
    """The largest power of two that is at most `count`."""
    return power_of_two(count + 1) // 2


def _most_warps(warps: int, elements: int) -> int:
    """At most `warps`, so that each thread has four neighbouring elements of a block of `elements`."""
    return min(warps, max(elements // (4 * WARP), 1))


def _rows_of_sectors(schedule: TritonSchedule, block_cols: int) -> int:
    """Rows of a program if the rows are the contiguous axis: neighbouring rows share 32-byte sectors.

    Two rows a program: the layer norm of Whisper's residual stream (a convolution's layout, 98 MB) took 64 µs.
    """
    held = max(block_cols * schedule.registers_per_column, 1)
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


def _repeats(nest: Nest, accesses: Sequence[Access]) -> bool:
    """Whether an element is read again: by neighbours along the columns, or by several loads at computed places.

    A prefetch would copy it once for each reader, in the first case four bytes at a time, in the second from L2.
    Six moments for each sample and group of 16 channels in the gradient of a group norm, 2,097,152 elements: 107 us.
    The gradient of a pooling whose windows overlap, with that of the batch norm before it, 51 million elements: 547 us.
    """
    across = [nest.split(access.strides)[1] for access in accesses]
    gathered = [access.buffer for access in accesses if access.by]
    return len(set(gathered)) < len(gathered) or (nest.cols[-1] > 1 and any(columns[-1] == 0 for columns in across))


def _tile_of_columns(
    nest: Nest, schedule: TritonSchedule, tile: int, repeats: bool, loads: int
) -> tuple[int, int, int, int]:
    """Rows, columns, elements and warps of a tile whose program owns some of the columns."""
    # Each element needs an accumulator per sum, and one or two registers per load.
    many = len(schedule.sums) > 2 or loads > MANY_LOADS
    single = schedule.loads_singly
    each = 4 if repeats else 8 if many else 16
    rows = power_of_two(nest.row_count)
    widest = max(each // 4 * tile // rows, LEAST_COLUMNS) if schedule.has_few_rows else tile
    columns = nest.cols[-1] if schedule.cuts_columns else nest.col_count
    block_cols = block_width(columns, SINGLE_COLUMNS if single else widest)
    # Many loads in flight, since each brings one element.
    block_rows = min(rows, max(each // 4 * (2 if single else 1) * tile // block_cols, 2))
    elements = block_rows * block_cols
    # Sums over 16 images of 64 x 64 x 128 in bf16: 13 to 14 µs on an H200, with 16 elements a thread 20 to 21.
    held = 32 if each == 16 and not single else each
    return block_rows, block_cols, elements, max(elements // (held * WARP), 1)


def _tile_of_rows(rows: int, wide: int, schedule: TritonSchedule, tile: int) -> tuple[int, int, int, int]:
    """Rows, columns, elements and warps of a tile whose program owns `wide` columns, in pieces where they are many."""
    block_cols = wide // schedule.pieces
    # Two rows share the barriers of one reduction; rows in pieces would be in different warps.
    fewest = 1 if wide > 4 * tile or schedule.pieces > 1 else 2
    block_rows = min(power_of_two(rows), _power_below(max(4 * tile // wide, fewest)))
    elements = block_rows * wide
    # 32 elements a thread, or fewer if its columns need more registers.
    warps = max(
        power_of_two(-(-elements // (32 * WARP))),
        power_of_two(-(-wide * schedule.registers_per_column // (COLUMN_REGISTERS * WARP))),
    )
    warps = _most_warps(warps, block_rows * block_cols) if schedule.pieces > 1 else warps
    return block_rows, block_cols, elements, warps


def _in_strips(nest: Nest, schedule: TritonSchedule, processors: int, tile: int, shared_bytes: int) -> Blocking:
    """Column sums: each program loops over a strip of rows and prefetches the next tiles.

    H200, bf16, 16384 rows: GELU's derivative and its sums, 8192 columns: 223 µs (192 at the bandwidth of a copy), one
    whole row at a time 361. Layer norm's derivative, 2048 columns: 86 µs (64), in tiles of one row 110, one row at a
    time 151.
    """
    rows, columns = nest.row_count, nest.col_count
    wide = schedule.row_lanes if schedule.whole_row else LONG_BLOCK
    accesses = [s.access for s in nest.steps if s.name == "load" and s.access and s.level is Level.FULL]
    loads, repeats = [access.buffer for access in accesses], _repeats(nest, accesses)
    # If rows are too long for registers and each sum is one number, use as many programs as without a sum.
    is_number = not schedule.whole_row and all(nest.steps[i].level is Level.SCALAR for i in schedule.sums)
    if is_number:
        # Four elements a thread: 471 µs for a hinge loss of 32768² in bf16 on an H200, with sixteen 603.
        block_rows, block_cols, elements, warps = 1, wide, wide, max(wide // 128, 4)
    elif schedule.splits_columns:
        block_rows, block_cols, elements, warps = _tile_of_columns(nest, schedule, tile, repeats, len(loads))
    else:
        block_rows, block_cols, elements, warps = _tile_of_rows(rows, wide, schedule, tile)
    across = schedule.column_blocks(block_cols) if schedule.splits_columns else 1
    tiles = -(-rows // block_rows)
    fills = schedule.whole_row and not schedule.splits_columns and wide * schedule.registers_per_column > FULL
    waves = PER_PROCESSOR if is_number else 1 if fills else SINGLE_WAVES if schedule.loads_singly else WAVES
    most = 1 if schedule.one_strip else max(waves * processors // across, 1)
    strip = -(-tiles // min(tiles, most))
    if any(schedule.accumulator(nest.steps[i]) != accumulator_dtype(nest.steps[i]) for i in schedule.sums):
        strip = min(strip, MOST_TILES)
    strips = -(-tiles // strip)
    tile_bytes = elements * sum(getattr(torch, nest.buffers[place].dtype).itemsize for place in loads)
    deepest = MOST_AHEAD if wide * schedule.registers_per_column <= REGISTERS or schedule.splits_columns else 1
    prefetches = schedule.whole_row and not repeats and not schedule.loads_singly
    ahead = 1 + min(deepest, shared_bytes // max(tile_bytes, 1)) if prefetches else 1
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
