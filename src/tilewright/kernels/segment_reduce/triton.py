"""The gradient of an embedding in Triton: rows are summed in the order of their positions.

It is deterministic: atomic additions would need an fp32 table and give another result at every run. The same kernels
take the largest or smallest of the rows (`REDUCTION`), or sum only elements where another tensor equals the entry's own
row (`SELECT`), which is the gradient of such a maximum.
The positions are sorted by index, stably. One program owns one row of the table, or several narrow ones: it adds its
positions' rows in fp32 and writes each row once (zeros where it has no position). A row with many positions is first
summed in chunks of positions, by a kernel that returns at once for other rows.

Limit: memory. Share of a copy on an H200, bf16, 65536 positions in 50257 x 4096: 0.75 (PyTorch 0.08), of which the sort
takes 84 of 307 µs.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import rounded
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe

MOST_COLUMNS = 2048
PART_ROWS = 4
"""The fewest rows of a tile in which a long run is summed."""
CHUNK = 64
"""Positions of a partial sum of a long run; one program sums a run of up to two chunks."""
BOUNDS = 256
"""Entries whose bounds one program finds."""
TILE = 2048
"""Elements of a program's sums if it takes several entries of few columns."""
RUN = 2
"""With more positions per entry in the mean, a program takes one entry. One warp suffices for 256 columns, so that no
barrier delays the loads of the next position."""
PROGRAMS = 264
"""With more programs (two per multiprocessor of an H200), each takes several entries."""
PARTS = 1024
"""Elements of a tile of a long run's rows, per warp of a program."""


@triton.jit(do_not_specialize=["count", "entries"])
def find_bounds(
    keys: tl.tensor, bounds: tl.tensor, count: tl.int64, entries: tl.int64, STEPS: tl.constexpr, ENTRIES: tl.constexpr
) -> None:
    """bounds[e] = how many of the sorted keys are less than e, for 0 ≤ e ≤ entries; 2^STEPS > count."""
    smallest = tl.load(keys, mask=count > 0, other=0)
    largest = tl.load(keys + (count - 1), mask=count > 0, other=0)
    tl.device_assert((smallest >= 0) & (largest < tl.maximum(entries, 1)), "index out of range of the sums")
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    low = tl.zeros([ENTRIES], tl.int64)
    high = low + count
    for _ in range(STEPS):
        middle = (low + high) // 2
        key = tl.load(keys + middle, mask=low < high, other=0)
        is_less = (low < high) & (key < entry)
        high = tl.where(is_less, high, middle)
        low = tl.where(is_less, middle + 1, low)
    tl.store(bounds + entry, low, mask=entry <= entries)


SUM, LARGEST, SMALLEST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(-1)
"""`REDUCTION` the rows of an entry are reduced."""
ALL, MATCHING, COUNTED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""`SELECT`: reduce all elements; only those whose `other` equals the entry's own element; or count the latter."""


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smaller(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _combined(a: tl.tensor, b: tl.tensor, REDUCTION: tl.constexpr) -> tl.tensor:
    if REDUCTION == SUM:
        return a + b
    else:
        return _larger(a, b) if REDUCTION == LARGEST else _smaller(a, b)


@triton.jit
def _over_rows(x: tl.tensor, REDUCTION: tl.constexpr) -> tl.tensor:
    if REDUCTION == SUM:
        return tl.sum(x, 0)
    else:
        return tl.reduce(x, 0, _larger) if REDUCTION == LARGEST else tl.reduce(x, 0, _smaller)


@triton.jit
def _neutral(REDUCTION: tl.constexpr) -> tl.constexpr:
    return 0.0 if REDUCTION == SUM else -float("inf") if REDUCTION == LARGEST else float("inf")


@triton.jit
def _elements(
    dout: tl.tensor, other: tl.tensor, own: tl.tensor, row: tl.tensor, column: tl.tensor, inside: tl.tensor,
    columns: tl.tensor, stride: tl.int64, REDUCTION: tl.constexpr, SELECT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The contribution of each row to its entry, fp32; `own` is the entry's own row, or one for each row."""
    if SELECT == COUNTED:
        value = inside.to(tl.float32)
    else:
        at = dout + row[:, None] * stride + column[None, :]
        value = tl.load(at, mask=inside, other=_neutral(REDUCTION)).to(tl.float32)
    if SELECT != ALL:
        theirs = tl.load(other + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
        value *= (theirs == own).to(tl.float32)
    return value


@triton.jit
def _sum_rows(
    dout: tl.tensor, other: tl.tensor, own: tl.tensor, order: tl.tensor, start: tl.tensor, last: tl.tensor,
    columns: tl.tensor, column: tl.tensor, stride: tl.int64, REDUCTION: tl.constexpr, SELECT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Σ dout[order[i], column] for start ≤ i < last, fp32."""
    total = tl.full([ROWS, COLUMNS], _neutral(REDUCTION), tl.float32)
    while start < last:
        place = start + tl.arange(0, ROWS)
        row = tl.load(order + place, mask=place < last, other=0).to(tl.int64)
        inside = (place < last)[:, None] & (column < columns)[None, :]
        total = _combined(
            total, _elements(dout, other, own, row, column, inside, columns, stride, REDUCTION, SELECT), REDUCTION
        )
        start += ROWS
    return _over_rows(total, REDUCTION)


@triton.jit
def _own(
    mine: tl.tensor, entry: tl.tensor, column: tl.tensor, inside: tl.tensor, columns: tl.tensor, SELECT: tl.constexpr
) -> tl.tensor:
    """The entry's row of `mine`, with which elements are compared."""
    if SELECT == ALL:
        return tl.zeros_like(column).to(tl.float32)
    else:
        return tl.load(mine + entry.to(tl.int64) * columns + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["count", "padding"])
def long_runs(
    dout: tl.tensor, other: tl.tensor, mine: tl.tensor, keys: tl.tensor, order: tl.tensor, bounds: tl.tensor,
    parts: tl.tensor, count: tl.int64, columns: tl.tensor, stride: tl.int64, padding: tl.int64, REDUCTION: tl.constexpr,
    SELECT: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """parts[chunk, end, :] = the sum within the chunk of the long run at that end of the chunk of positions.

    A run of equal indices is long if it has more than two chunks of positions, so that it reaches one of the two ends
    (0 first, 1 last) of every chunk it touches. A run at both ends counts for the first.
    """
    first = tl.program_id(0).to(tl.int64) * CHUNK
    final = tl.minimum(first + CHUNK, count)
    end = tl.program_id(2)
    head = tl.load(keys + first).to(tl.int64)
    key = tl.load(keys + (final - 1)).to(tl.int64) if end == 1 else head
    start, last = tl.load(bounds + key), tl.load(bounds + key + 1)
    if (last - start > 2 * CHUNK) & (key != padding) & ((end == 0) | (key != head)):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        start, last = tl.maximum(start, first), tl.minimum(last, final)
        own = _own(mine, key, column, column < columns, columns, SELECT)[None, :]
        total = _sum_rows(
            dout, other, own, order, start, last, columns, column, stride, REDUCTION, SELECT, ROWS, COLUMNS
        )  # fmt: skip
        part = (tl.program_id(0).to(tl.int64) * 2 + end) * columns
        tl.store(parts + part + column, total, mask=column < columns)


@triton.jit
def _sum_parts(
    parts: tl.tensor, start: tl.tensor, last: tl.tensor, columns: tl.tensor, column: tl.tensor, REDUCTION: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The sum over the chunks of a long run, which in its first chunk may be the run at the last end."""
    total = tl.full([ROWS, COLUMNS], _neutral(REDUCTION), tl.float32)
    chunk = start // CHUNK
    while chunk * CHUNK < last:
        each = chunk + tl.arange(0, ROWS)
        part = each * 2 + (each * CHUNK < start).to(tl.int64)
        inside = (each * CHUNK < last)[:, None] & (column < columns)[None, :]
        each_part = tl.load(parts + part[:, None] * columns + column[None, :], mask=inside, other=_neutral(REDUCTION))
        total = _combined(total, each_part, REDUCTION)
        chunk += ROWS
    return _over_rows(total, REDUCTION)


@triton.jit
def _rows_of(
    order: tl.tensor, start: tl.tensor, step: tl.tensor, length: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The rows at four positions from `step` on of each entry."""
    at, left = order + start + step, length - step
    return (
        tl.load(at, mask=left > 0, other=0).to(tl.int64),
        tl.load(at + 1, mask=left > 1, other=0).to(tl.int64),
        tl.load(at + 2, mask=left > 2, other=0).to(tl.int64),
        tl.load(at + 3, mask=left > 3, other=0).to(tl.int64),
    )


@triton.jit
def _sum_short(
    dout: tl.tensor, other: tl.tensor, own: tl.tensor, order: tl.tensor, start: tl.tensor, length: tl.tensor,
    columns: tl.tensor, column: tl.tensor, stride: tl.int64, REDUCTION: tl.constexpr, SELECT: tl.constexpr,
    ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[ENTRIES, COLUMNS], fp32: Σ dout[order[i], column] for the `length` positions i from each entry's start."""
    total = tl.full([ENTRIES, COLUMNS], _neutral(REDUCTION), tl.float32)
    steps = tl.max(length, 0)
    inside = (column < columns)[None, :]
    step = 0
    if ENTRIES == 1:
        row0, row1, row2, row3 = _rows_of(order, start, 0, length)
        while step < steps:
            # Four rows are loaded at once, and the numbers of the next four beside them; they are added in their order.
            next0, next1, next2, next3 = _rows_of(order, start, step + 4, length)
            left = (length - step)[:, None]
            x0 = _elements(dout, other, own, row0, column, inside & (left > 0), columns, stride, REDUCTION, SELECT)
            x1 = _elements(dout, other, own, row1, column, inside & (left > 1), columns, stride, REDUCTION, SELECT)
            x2 = _elements(dout, other, own, row2, column, inside & (left > 2), columns, stride, REDUCTION, SELECT)
            x3 = _elements(dout, other, own, row3, column, inside & (left > 3), columns, stride, REDUCTION, SELECT)
            total = _combined(
                _combined(_combined(_combined(total, x0, REDUCTION), x1, REDUCTION), x2, REDUCTION), x3, REDUCTION
            )
            row0, row1, row2, row3 = next0, next1, next2, next3
            step += 4
    else:
        # Entries have few positions. A row's number passes through shared memory, so load it one step ahead.
        row = tl.load(order + start, mask=length > 0, other=0).to(tl.int64)
        while step < steps:
            following = tl.load(order + start + step + 1, mask=step + 1 < length, other=0).to(tl.int64)
            x = _elements(
                dout, other, own, row, column, inside & (step < length)[:, None], columns, stride, REDUCTION, SELECT
            )
            total = _combined(total, x, REDUCTION)
            row = following
            step += 1
    return total


@triton.jit(do_not_specialize=["entries", "padding"])
def backward(
    dout: tl.tensor, other: tl.tensor, mine: tl.tensor, order: tl.tensor, bounds: tl.tensor, parts: tl.tensor,
    dweight: tl.tensor, columns: tl.tensor, stride: tl.int64, entries: tl.int64, padding: tl.int64,
    start_value: tl.float32, REDUCTION: tl.constexpr, SELECT: tl.constexpr, INCLUDE_INITIAL: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ENTRIES: tl.constexpr, ADD: tl.constexpr,
) -> None:  # fmt: skip
    """Program (e, c): Σ dout[order[i], :] for bounds[entry] ≤ i < bounds[entry + 1], of `ENTRIES` entries.

    The padding's entry gets 0. With ADD the sums are added to dweight, whose rows without a position stay as they are.
    The extreme of an entry without a position is `start_value`; with INCLUDE_INITIAL every extreme includes this value.
    """
    place = tl.arange(0, ENTRIES)
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + place
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(bounds + entry, mask=entry < entries, other=0)
    last = tl.load(bounds + entry + 1, mask=entry < entries, other=0)
    last = tl.where(entry == padding, start, last)
    is_long = last - start > 2 * CHUNK
    short = tl.where(is_long, 0, last - start)
    in_table = (entry < entries)[:, None] & (column < columns)[None, :]
    own = _own(mine, entry[:, None], column[None, :], in_table, columns, SELECT)
    total = _sum_short(
        dout, other, own, order, start, short, columns, column, stride, REDUCTION, SELECT, ENTRIES, COLUMNS
    )  # fmt: skip
    first = tl.min(tl.where(is_long, place, ENTRIES), 0)
    while first < ENTRIES:
        is_first = place == first
        begin, end = tl.sum(tl.where(is_first, start, 0), 0), tl.sum(tl.where(is_first, last, 0), 0)
        part = _sum_parts(parts, begin, end, columns, column, REDUCTION, CHUNK, ROWS, COLUMNS)
        total = tl.where(is_first[:, None], part[None, :], total)
        is_long = is_long & (place != first)
        first = tl.min(tl.where(is_long, place, ENTRIES), 0)
    if REDUCTION != SUM:
        total = tl.where((last > start)[:, None], total, start_value)
        total = _combined(total, tl.zeros_like(total) + start_value, REDUCTION) if INCLUDE_INITIAL else total
    written = ((entry < entries) & (last > start) if ADD else entry < entries)[:, None] & (column < columns)[None, :]
    to = dweight + entry[:, None] * columns + column[None, :]
    if ADD:
        total += tl.load(to, mask=written, other=0.0).to(tl.float32)
    tl.store(to, rounded(total, dweight.dtype.element_ty), mask=written)


def bounds_recipe(call: RecipeBuilder, keys: Operand, entries: int) -> Recipe:
    """Where the sorted keys of each entry begin, int64 [entries + 1]; a key outside stops the device."""
    bounds, count = call.empty((entries + 1,), torch.int64), keys.numel()
    call.launch(
        find_bounds, (triton.cdiv(entries + 1, BOUNDS),),
        keys, bounds, count, entries, STEPS=max(count, 1).bit_length(), ENTRIES=BOUNDS, num_warps=4, debug=True,
        sanitize_overflow=False,
    )  # fmt: skip
    return call.finish(bounds)


def sums_recipe(
    call: RecipeBuilder, dout: Operand, keys: Operand, order: Operand, bounds: Operand, entries: int, padding: int
) -> Recipe:
    """dweight[entries, D], summed in the order of the positions; `padding` is -1 without a padding row.

    keys: the indices, of 16 or 32 bits and sorted; order: their positions in dout; bounds: of `bounds_recipe`.
    """
    dweight = call.empty((entries, dout.shape[-1]), dout.dtype)
    _launch_sums(call, dout, keys, order, bounds, dweight, padding)
    return call.finish(dweight)


def added_recipe(
    call: RecipeBuilder, table: Operand, dout: Operand, keys: Operand, order: Operand, bounds: Operand, padding: int
) -> Recipe | None:
    """`sums_recipe`, added to table[entries, D] in place; None unless it is dense and of dout's dtype."""
    if not table.is_contiguous() or table.dtype != dout.dtype:
        return None
    _launch_sums(call, dout, keys, order, bounds, table, padding, ADD=True)
    return call.finish(call.empty((0,), dout.dtype))


def extremes_recipe(
    call: RecipeBuilder, rows: Operand, keys: Operand, order: Operand, bounds: Operand, entries: int, largest: bool,
    start: float, include: bool,
) -> Recipe:  # fmt: skip
    """The largest, or the smallest, of each entry's rows, [entries, D]."""
    found = call.empty((entries, rows.shape[-1]), rows.dtype)
    how = (LARGEST if largest else SMALLEST).value
    _launch_sums(call, rows, keys, order, bounds, found, start=start, REDUCTION=how, INCLUDE_INITIAL=include)
    return call.finish(found)


def matching_recipe(
    call: RecipeBuilder, other: Operand, own: Operand, rows: Operand | None, keys: Operand, order: Operand,
    bounds: Operand,
) -> Recipe:  # fmt: skip
    """Sums of rows where `other` equals the entry's row of `own`; without rows how many there are."""
    other, own = call.contiguous(other), call.contiguous(own)
    total = call.empty(own.shape, own.dtype)
    match = (COUNTED if rows is None else MATCHING).value
    values = other if rows is None else rows
    _launch_sums(call, values, keys, order, bounds, total, other=other, own=own, SELECT=match)
    return call.finish(total)


def _launch_sums(
    call: RecipeBuilder, dout: Operand, keys: Operand, order: Operand, bounds: Operand, dweight: Operand,
    padding: int = -1, *, other: Operand | None = None, own: Operand | None = None, start: float = 0.0, **how: int,
) -> None:  # fmt: skip
    """The kernels that write `dweight` [entries, D]; `how`: constants of `backward` beside those of its tiles."""
    columns, count = dout.shape[-1], keys.numel()
    if len(dout.shape) != 2 or dout.strides[1] != 1:
        dout = call.contiguous(dout)
    stride = dout.strides[0] if len(dout.shape) == 2 else columns
    entries = dweight.shape[0]
    wide = min(triton.next_power_of_2(max(columns, 1)), MOST_COLUMNS)
    blocks, chunks = triton.cdiv(columns, wide), triton.cdiv(count, CHUNK)
    parts = call.empty((chunks, 2, columns), torch.float32)
    constants = {"REDUCTION": 0, "SELECT": 0, "INCLUDE_INITIAL": False, "ADD": False} | how
    of_rows = {key: constants[key] for key in ("REDUCTION", "SELECT")}
    together, warps = 1, min(max(wide // 256, 1), 4)
    if count < RUN * entries:
        together, warps = triton.next_power_of_2(max(1, min(TILE // wide, entries // PROGRAMS))), 4
    sizes = {"CHUNK": CHUNK, "ROWS": max(PART_ROWS, PARTS * warps // wide), "COLUMNS": wide, "num_warps": warps}
    compared = (dout if other is None else other, dout if own is None else own)
    if chunks > 2:
        grid = chunks, blocks, 2
        call.launch(
            long_runs, grid, dout, *compared, keys, order, bounds, parts, count, columns, stride, padding, **of_rows,
            **sizes,
        )  # fmt: skip
    call.launch(
        backward, (triton.cdiv(entries, together), blocks),
        dout, *compared, order, bounds, parts, dweight, columns, stride, entries, padding, start, ENTRIES=together,
        **constants, **sizes,
    )  # fmt: skip
