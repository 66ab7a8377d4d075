"""Blocks of a nest that the threads of a CPU share."""

from __future__ import annotations

from math import prod

from tilewright.loops.nest import Nest
from tilewright.loops.sizes import Size, may_exceed
from tilewright.schedule.facts import Facts
from tilewright.schedule.schedule import Axis, Schedule

SUMMED = 512
"""Nonnegative elements summed in fp32 before the partial sum is added to a double."""
SERIAL = 16384
"""Nests with fewer elements run on the calling thread."""
TILE_ROWS, TILE_COLUMNS = 64, 16
"""An elementwise nest reads a transposed tensor in tiles of this size, so that it uses whole cache lines."""
FLAT_BLOCK = 8192
"""Elements of an elementwise nest per unit of work of a thread."""


def cpu_schedule(nest: Nest) -> Schedule:
    """Threads share blocks of an elementwise nest, and else rows, over whose columns they loop."""
    is_elementwise = Facts(nest).kind != "rows" and len(nest.cols) == 1
    draws = any(step.name == "draw" for step in nest.steps)
    # A nest that draws is in no tiles: its numbers come in order.
    tiled = is_elementwise and bool(nest.rows) and nest.transposes and not draws
    width = TILE_COLUMNS if tiled else FLAT_BLOCK if is_elementwise else SUMMED
    extent = nest.cols[-1] if nest.cols else 1
    rows, cols = Axis(TILE_ROWS if tiled else 1), Axis(width if may_exceed(extent, width) else extent)
    *outer, last = nest.rows or (1,)
    programs = prod(outer) * -(-last // rows.tile)
    if is_elementwise:
        programs *= -(-extent // cols.tile)
    else:
        cols = Axis(cols.tile, "loop", -(-nest.col_count // max(cols.tile, 1)))
    # Without rows threads have nothing to share, and a result may alias an operand that is still to be read.
    count = nest.row_count * nest.col_count
    is_shared = bool(nest.rows or is_elementwise) and (count >= SERIAL or isinstance(count, Size))
    return Schedule(rows, cols, programs, warps=0, is_shared=is_shared)
