"""A kernel's launch in the terminal: accesses of its programs, occupancy and waves, other tiles, instructions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from tilewright.hardware.geometry import Alternative, KernelView, is_scattered, tiles_of
from tilewright.hardware.occupancy import Occupancy, Waves
from tilewright.records.counted import counted
from tilewright.records.launch_record import Access, Grid, LaunchRecord, Operand, ProgramAccesses, Range
from tilewright.report.quantity import duration, nbytes
from tilewright.report.tables import FittedTable

_COLUMNS_SHOWN = 9
_STEPS_SHOWN = 3
_NAME_SHOWN = 100
_FIGURES = ("programs", "tiles", "registers", "stack", "shared", "per SM", "occupancy", "limit", "waves", "idle")
_ENOUGH_PROGRAMS = 4
"""Rule of thumb: with fewer programs per multiprocessor memory latency is not hidden."""


def show_kernel(view: KernelView) -> RenderableType:
    """Everything about one launch except the text of its code."""
    launch = view.launch
    parts: list[RenderableType] = [_heading(view)]
    if view.walks:
        parts += [Text("\nprograms", "bold"), Text(draw(view.walks, launch))]
    parts += [Text("\noccupancy and waves", "bold"), _residence(view, view.occupancy)]
    if view.alternatives:
        parts += [Text("\nother tile sizes", "bold"), _alternatives(view)]
        parts += [Text(f"{_change(other)}: {other.refused}", "dim") for other in view.alternatives if other.refused]
    if view.instructions is not None:
        parts += [Text("\ninstructions in the machine code", "bold"), _instructions(view)]
    parts += [Text(note, "yellow") for note in (*view.notes, launch.note) if note]
    return Group(*parts)


def _heading(view: KernelView) -> Text:
    launch = view.launch
    grid = _grid(launch.grid)
    rule = f" = {view.grid_rule}" if view.grid_rule else ""
    lines = [
        f"{launch.language} at {launch.place}, on {view.device} (compute capability {launch.capability})",
        f"{counted(launch.programs, 'program')}, grid {grid}{rule}, {launch.threads} threads each",
    ]
    if launch.operands:
        lines.append(", ".join(_operand(operand) for operand in launch.operands))
    if launch.constants:
        lines.append(", ".join(f"{name} {value}" for name, value in launch.constants.items()))
    if launch.measured_us is not None:
        lines.append(f"measured {duration(launch.measured_us)}")
    return Text.assemble((_short(launch.name), "bold"), "\n" + "\n".join(lines))


def _short(name: str) -> str:
    """Shorten a name: those of library kernels include template arguments."""
    return name if len(name) <= _NAME_SHOWN else f"{name[:_NAME_SHOWN]}…"


def _operand(operand: Operand) -> str:
    return f"{operand.name} {operand.dtype}[{', '.join(map(str, operand.shape))}]"


def _grid(grid: Grid) -> str:
    x, y, z = grid
    return f"({x:,})" if (y, z) == (1, 1) else f"({x:,}, {y:,})" if z == 1 else f"({x:,}, {y:,}, {z:,})"


def draw(walks: Sequence[ProgramAccesses], launch: LaunchRecord) -> str:
    """The accesses of the first program; then a map of the tiles of one operand with program and step."""
    lines = [f"each walks {_tiles(tiles_of(walks[0]))}; program {_name(walks[0], launch)}"]
    by_operand: dict[tuple[str, str], list[Access]] = {}
    for access in walks[0].accesses:
        by_operand.setdefault((access.direction, access.operand), []).append(access)
    lines += [
        f"  {direction}s {_hull(accesses)}" for (direction, _), accesses in by_operand.items() if _nonempty(accesses)
    ]
    drawn = _drawn_operand(walks, launch)
    return "\n".join(lines if drawn is None else [*lines, "", *_map(walks, launch, drawn)])


def _nonempty(accesses: Sequence[Access]) -> list[Access]:
    return [access for access in accesses if access.elements]


def _hull(accesses: Sequence[Access]) -> str:
    """`x[0–15, 0–511] in 8 tiles of 16×64`."""
    nonempty = _nonempty(accesses)
    tiles = list(dict.fromkeys(access.ranges for access in nonempty))
    axes = [
        (min(ranges[axis][0] for ranges in tiles), max(ranges[axis][1] for ranges in tiles))
        for axis in range(len(tiles[0]))
    ]
    first = nonempty[0]
    block = "×".join(str(n) for n in first.shape if n > 1) or "1"
    times = len(nonempty) / len(tiles)
    text = f"{first.operand}[{', '.join(map(_range, axes))}] in {_tiles(len(tiles))} of {block}"
    if times > 1:
        text += f", {times:.3g} times"
    if first.elements < first.lanes:
        text += f", {1 - first.elements / first.lanes:.0%} of the lanes masked"
    return text + (", scattered" if any(map(is_scattered, nonempty)) else "")


def _tiles(n: int) -> str:
    return "1 tile" if n == 1 else f"{n:,} tiles"


def _range(ends: Range) -> str:
    first, last = ends
    return f"{first:,}" if first == last else f"{first:,}–{last:,}"


def _drawn_operand(walks: Sequence[ProgramAccesses], launch: LaunchRecord) -> Operand | None:
    """The operand to draw, of at least two axes: a written one first, then few axes, then many tiles."""
    candidates = {operand.name: operand for operand in launch.operands if len(operand.shape) > 1}
    best: tuple[tuple[bool, int, int], Operand] | None = None
    for name, operand in candidates.items():
        accesses = [access for access in walks[0].accesses if access.operand == name and access.elements]
        if not accesses or any(map(is_scattered, accesses)):
            continue
        written = any(access.direction == "write" for access in accesses)
        score = (written, -len(operand.shape), len({access.ranges for access in accesses}))
        if best is None or score > best[0]:
            best = (score, operand)
    return best[1] if best else None


def _map(walks: Sequence[ProgramAccesses], launch: LaunchRecord, operand: Operand) -> list[str]:
    """Rows of the operand against its columns; a cell has the program that accesses the tile, or its step."""
    steps: dict[tuple[str, str, str], list[int]] = {}
    rows: dict[str, tuple[Range, ...]] = {}
    columns: dict[str, Range] = {}
    for walk in walks:
        seen: dict[tuple[Range, ...], int] = {}
        for access in walk.accesses:
            if access.operand != operand.name or not access.elements:
                continue
            step = seen.setdefault(access.ranges, len(seen) + 1)
            *leading, column = access.ranges
            row = ", ".join(map(_range, leading))
            rows[row], columns[_range(column)] = tuple(leading), column
            visits = steps.setdefault((row, _range(column), _name(walk, launch)), [])
            if step not in visits:
                visits.append(step)
    shown = _shown(sorted(columns, key=lambda text: columns[text]))
    table: list[list[str]] = [["", "program", *shown]]
    for row in sorted(rows, key=lambda text: rows[text]):
        owners = list(dict.fromkeys(owner for at, _, owner in steps if at == row))
        for owner in owners:
            cells = [_cell(steps.get((row, column, owner), []), column) for column in shown]
            table.append([row, owner, *cells])
    if launch.programs > len(walks):
        table.insert(len(table) // 2 + 1, ["⋮", "⋮", *([""] * len(shown))])
    heading = f"{operand.name}{list(operand.shape)}: which program owns which tile, numbered in the order of its walk"
    return [heading, *_aligned(table)]


def _shown(columns: list[str]) -> list[str]:
    if len(columns) <= _COLUMNS_SHOWN:
        return columns
    return [*columns[: _COLUMNS_SHOWN - 2], "…", columns[-1]]


def _cell(steps: list[int], column: str) -> str:
    if column == "…":
        return "…"
    if len(steps) > _STEPS_SHOWN:
        return f"{steps[0]} … {steps[-1]}"
    return " ".join(map(str, steps)) or "·"


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        ("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))).rstrip() for row in table
    ]


def _name(walk: ProgramAccesses, launch: LaunchRecord) -> str:
    axes = [i for i, n in enumerate(launch.grid) if n > 1]
    indices = [str(walk.program[i]) for i in axes] or ["0"]
    return indices[0] if len(indices) == 1 else f"({', '.join(indices)})"


def _residence(view: KernelView, found: Occupancy) -> Text:
    launch = view.launch
    limits = ", ".join(f"{resource} {blocks}" for resource, blocks in found.limits.items())
    lines = [
        f"{launch.registers} registers a thread, {launch.stack_bytes} B of stack, "
        f"{nbytes(launch.shared_bytes)} of shared memory a program",
        f"a multiprocessor holds {counted(found.blocks, 'program')} "
        f"({found.warps} warps, {found.share:.0%}), limited by {' and '.join(found.limited_by)}; each limit alone "
        f"allows: {limits}",
    ]
    if view.waves is not None:
        lines += _wave_lines(view.waves)
    return Text("\n".join(lines))


def _wave_lines(waves: Waves) -> list[str]:
    line = (
        f"{waves.sms} multiprocessors × {waves.blocks_per_sm} = {waves.slots:,} at once: {waves.waves:.2f} waves, "
        f"the last {waves.idle:.0%} idle"
    )
    each = waves.programs / waves.sms
    if each < _ENOUGH_PROGRAMS:
        line += f"\n{each:.2g} programs for each multiprocessor; "
        line += f"about {_ENOUGH_PROGRAMS} are needed to hide latency"
    if (idle := waves.sms - waves.programs) > 0:
        return [line, f"{counted(idle, 'multiprocessor')} {'gets' if idle == 1 else 'get'} no program"]
    if waves.turns == 1:
        busiest = -(-waves.programs // waves.sms)
        return [line, f"all in one wave; the busiest multiprocessor has {counted(busiest, 'program')}"]
    alone, shared = waves.tail(waves.alone_waves), waves.tail(waves.shared_waves)
    return [
        line,
        f"that idle part costs {shared:.1%} of the time if fewer programs keep memory or the tensor cores as busy, "
        f"{alone:.1%} if a program takes as long whatever runs beside it",
    ]


def _alternatives(view: KernelView) -> RenderableType:
    """A row per launch."""
    measured = any(other.launch and other.launch.measured_us is not None for other in view.alternatives)
    columns = [
        "",
        *(name if name == "limit" else f"{name}>" for name in _FIGURES),
        *(["measured>"] if measured else []),
    ]
    table = FittedTable(columns, left_out=("limit", "stack"))
    tiles = tiles_of(view.walks[0]) if view.walks else None
    as_is = Alternative({}, view.launch, view.occupancy, view.waves, tiles)
    for other in (as_is, *view.alternatives):
        if not other.refused:
            table.add_row(*_alternative(other, measured))
    return table


def _change(other: Alternative) -> str:
    return ", ".join(f"{name} {value}" for name, value in other.change.items()) or "as launched"


def _alternative(other: Alternative, measured: bool) -> list[str]:
    launch, found = other.launch, other.occupancy
    assert launch is not None and found is not None and other.waves is not None, "only a refused one has none"
    row = [
        _change(other),
        f"{launch.programs:,}",
        "-" if other.tiles is None else f"{other.tiles:,}",
        str(launch.registers),
        f"{launch.stack_bytes} B",
        nbytes(launch.shared_bytes),
        str(found.blocks),
        f"{found.share:.0%}",
        ", ".join(found.limited_by),
        f"{other.waves.waves:.2f}",
        f"{other.waves.idle:.0%}",
    ]
    return [*row, duration(launch.measured_us)] if measured else row


def _instructions(view: KernelView) -> Text:
    found = view.instructions
    assert found is not None
    lines = [f"{found.total:,} in all"]
    for memory, directions in (("global", ("load", "store")), ("shared", ("load", "store"))):
        for direction in directions:
            widths = found.widths(memory, direction)  # type: ignore[arg-type]
            if widths:
                lines.append(f"{memory} {direction}s: {_widths(widths)}")
    atomics = sum(n for (memory, _, _), n in found.moves.items() if memory == "atomic")
    lines += [f"{atomics} atomics"] if atomics else []
    lines += [f"tile copies: {_counted(found.bulk)}"] if found.bulk else []
    lines.append(f"matrix instructions: {_counted(found.matrix) if found.matrix else 'none'}")
    lines.append(f"spills: {found.spills} loads and stores of local memory" if found.spills else "no spills")
    lines.append(_counted(found.names))
    return Text("\n".join(lines))


def _widths(widths: Mapping[int, int]) -> str:
    return ", ".join(f"{n} of {width} B" for width, n in widths.items())


def _counted(names: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in names.items())
