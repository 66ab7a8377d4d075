"""Chooses the schedule of a nest for a GPU, and those beside it that a race may try."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilewright.loops.nest import Nest
from tilewright.schedule.blocks import power_of_two
from tilewright.schedule.facts import WARP
from tilewright.schedule.places import Places
from tilewright.schedule.schedule import Schedule
from tilewright.schedule.strips import strips
from tilewright.schedule.tiles import Limits, flat, rows_in_loop, rows_in_registers, tiles


def schedule_of(nest: Nest, limits: Limits = Limits()) -> Schedule:  # noqa: B008
    """The schedule of a nest on a GPU. What shapes the kernel's source depends on the nest alone."""
    places = Places(nest)
    if places.kind == "flat":
        return flat(places, limits)
    if places.kind == "tiles":
        found = tiles(places, limits)
    elif places.sums:
        found = strips(places, limits)
    elif places.columns == "loop":
        found = rows_in_loop(places, limits)
    else:
        found = rows_in_registers(places, limits)
    return _masked(nest, replace(found, cuts_columns=places.cuts_columns))


def _masked(nest: Nest, found: Schedule) -> Schedule:
    """The same, with masks for rows beyond the last if programs have any."""
    masks = bool(nest.rows) and (nest.row_count % found.rows.owned != 0 or bool(nest.argument_dtypes))
    return replace(found, masks_rows=masks)


def neighbours(nest: Nest, limits: Limits = Limits()) -> dict[str, Schedule]:  # noqa: B008
    """Schedules of one kernel by their text, the chosen one first: with half and twice its tile, wider and narrower
    tiles of a transposition, its programs of a strip, the columns of its loop over a long row, and its warps."""
    places, tile, processors = Places(nest), limits.tile, limits.processors
    asked = [limits, replace(limits, tile=tile // 2), replace(limits, tile=2 * tile)]
    if places.sums:
        asked += [replace(limits, processors=max(processors // 2, 1)), replace(limits, processors=2 * processors)]
    found = [schedule_of(nest, one) for one in asked]
    chosen = found[0]
    if places.kind == "tiles":
        found += _other_tiles(nest, chosen)
    if chosen.cols.place == "loop" and not places.scans:
        for width in (chosen.cols.tile // 2, 2 * chosen.cols.tile):
            found.append(replace(chosen, cols=replace(chosen.cols, tile=width, blocks=places.column_blocks(width))))
    found += [replace(one, warps=n) for one in found for n in (one.warps // 2, 2 * one.warps) if 1 <= n <= 32]
    return {str(one): one for one in found}


def _other_tiles(nest: Nest, chosen: Schedule) -> Iterator[Schedule]:
    """Tiles of half, once and twice the elements in other forms."""
    rows, columns = power_of_two(nest.row_count), power_of_two(nest.col_count)
    for wide in (-2, -1, 0, 1, 2):
        for high in (-2, -1, 0, 1, 2):
            if abs(wide + high) > 1:
                continue
            block_rows, block_cols = int(chosen.rows.tile * 2.0**high), int(chosen.cols.tile * 2.0**wide)
            if 1 <= block_rows <= rows and 1 <= block_cols <= columns:
                programs = -(-nest.row_count // block_rows) * -(-nest.col_count // block_cols)
                warps = max(min(block_rows * block_cols // (16 * WARP), 16), 1)
                sizes = replace(chosen.rows, tile=block_rows), replace(chosen.cols, tile=block_cols)
                yield _masked(nest, replace(chosen, rows=sizes[0], cols=sizes[1], programs=programs, warps=warps))
