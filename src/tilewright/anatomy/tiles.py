"""Other tile sizes: finds the rule of a grid, and compiles the kernel with each constant doubled and halved."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.anatomy.capture import TritonLaunch, launch_record, operands
from tilewright.anatomy.program_accesses import program_accesses, sampled
from tilewright.hardware.geometry import Alternative, KernelView, occupancy_and_waves, read, tiles_of, view_of, written
from tilewright.records.launch_record import Grid, Operand, ProgramAccesses

_SMALLEST_TILE = 8
_ENOUGH = 0.9
"""An alternative must access this share of the launch's elements; less means that its grid does not fit."""


@dataclass(frozen=True)
class Factor:
    """⌈size / constant⌉, or the size if there is no constant."""

    size: int
    constant: str
    value: int

    @property
    def extent(self) -> int:
        return -(-self.size // self.value)

    def __str__(self) -> str:
        return f"⌈{self.size:,} / {self.constant} {self.value}⌉" if self.constant else f"{self.size:,}"


Rule = tuple[tuple[Factor, ...], ...]


def grid_rule(captured: TritonLaunch) -> Rule | None:
    """For each axis of the grid the factors ⌈size / tile⌉ whose product it is; None if an axis has no such rule.

    An axis of 1 has no factor. If several rules fit, the first of `_candidates` is taken; `_alternative` checks that
    the grids derived from it do the same work.
    """
    tiles = {name: value for name, value in captured.constants.items() if _is_power(value)}
    numbers = {value for name, value in captured.arguments.items() if type(value) is int and name not in tiles}
    rule: list[tuple[Factor, ...]] = []
    for extent in captured.grid:
        # Among equal constants, prefer one that no other axis uses.
        used = [factor.constant for factors in rule for factor in factors]
        tiles = dict(sorted(tiles.items(), key=lambda item: item[0] in used))
        fitting = (
            chosen
            for chosen in _candidates(operands(captured), sorted(numbers), tiles)
            if math.prod(factor.extent for factor in chosen) == extent
        )
        found = () if extent == 1 else next(fitting, None)
        if found is None:
            return None
        rule.append(found)
    return tuple(rule)


def _candidates(
    of: Sequence[Operand], numbers: Sequence[int], tiles: Mapping[str, int]
) -> Iterator[tuple[Factor, ...]]:
    """Likely rules first: one factor of an operand's extent, of its number of elements or of an integer argument; then
    two axes of one operand; then any two. Results, the last operands, come before inputs.
    """
    shapes = [operand.shape for operand in of]
    extents = list(dict.fromkeys(size for shape in reversed(shapes) for size in (*shape, math.prod(shape))))
    single = [*_factors(extents, tiles), *_factors(numbers, tiles)]
    yield from ((factor,) for factor in single)
    pairs = list(itertools.combinations(tiles.items(), 2))
    for shape in reversed(shapes):
        axes = list(itertools.combinations(shape, 2))
        for (first, second), (down, across) in itertools.product(axes, pairs):
            yield Factor(first, *down), Factor(second, *across)
        yield from ((Factor(first, "", 1), Factor(second, "", 1)) for first, second in axes)
    for factor, other in itertools.combinations(single, 2):
        if factor.constant != other.constant:
            yield factor, other


def _factors(sizes: Sequence[int], tiles: Mapping[str, int]) -> list[Factor]:
    extents = [size for size in sizes if size > 1]
    divided = [Factor(size, name, value) for size in extents for name, value in tiles.items()]
    return divided + [Factor(size, "", 1) for size in extents]


def rule_text(rule: Rule | None) -> str:
    """`⌈1,000 / BLOCK_ROWS 16⌉`, with commas between axes; empty without a rule."""
    return ", ".join(" · ".join(map(str, factors)) for factors in rule or () if factors)


def _is_power(value: Any) -> bool:
    """Whether the value is an integer power of two; True and False are flags, not sizes."""
    return type(value) is int and value >= 1 and value & (value - 1) == 0


def view_launch(
    captured: TritonLaunch, device: str, sms: int, *, time: Callable[[TritonLaunch], float] | None
) -> KernelView:
    """The complete view of one launch. `time` measures a launch in microseconds; None without a device."""
    view = view_of(launch_record(captured, measured_us=time(captured) if time else None), device, sms)
    rule = grid_rule(captured)
    candidates = [(change, grid) for change in _changes(captured, rule) if (grid := _regrid(captured, rule, change))]
    followed = program_accesses(
        captured,
        [({}, captured.grid, sampled(captured.grid))]
        + [(_constants(captured, change), grid, [(0, 0, 0)]) for change, grid in candidates],
    )
    launched = followed[0]
    notes = [f"its programs are not drawn: {launched}"] if isinstance(launched, str) else []
    if rule is None and captured.grid_of is None:
        notes.append("no rule ⌈size / tile⌉ gives this grid, so other tile sizes are not laid out")
    alternatives = tuple(
        _alternative(captured, change, grid, sms, (launched, walks), time)
        for (change, grid), walks in zip(candidates, followed[1:], strict=True)
    )
    return dataclasses.replace(
        view,
        grid_rule=rule_text(rule),
        walks=() if isinstance(launched, str) else launched,
        alternatives=_worth_showing(alternatives),
        notes=tuple(notes),
    )


def _worth_showing(alternatives: tuple[Alternative, ...]) -> tuple[Alternative, ...]:
    """Omit refused changes of several constants, and refused single changes that work in combination."""
    together = [set(other.change) for other in alternatives if not other.refused and len(other.change) > 1]

    def is_redundant(other: Alternative) -> bool:
        return len(other.change) > 1 or any(set(other.change) < names for names in together)

    return tuple(other for other in alternatives if not (other.refused and is_redundant(other)))


def _changes(captured: TritonLaunch, rule: Rule | None) -> Iterator[dict[str, int]]:
    """Each tile size doubled and halved, and the number of warps.

    A small constant may be a flag or another count, so it is a tile size only if the grid's rule uses it.
    """
    divisors = {factor.constant for factors in rule or () for factor in factors}
    tiles = {
        name: value
        for name, value in captured.constants.items()
        if _is_power(value) and (name in divisors or value >= _SMALLEST_TILE)
    }
    groups: list[tuple[str, ...]] = [(name,) for name in tiles]
    # Equal constants may have to stay equal.
    alike = ([name for name in tiles if tiles[name] == value] for value in dict.fromkeys(tiles.values()))
    groups += [tuple(names) for names in alike if len(names) > 1]
    for names in groups:
        yield {name: 2 * tiles[name] for name in names}
        if tiles[names[0]] > 1:
            yield {name: tiles[name] // 2 for name in names}
    warps = captured.compiled.metadata.num_warps
    for changed in (2 * warps, warps // 2):
        if 1 <= changed <= 32:
            yield {"num_warps": changed}


def _constants(captured: TritonLaunch, change: Mapping[str, int]) -> dict[str, int]:
    return {name: value for name, value in change.items() if name in captured.arguments}


def _regrid(captured: TritonLaunch, rule: Rule | None, change: Mapping[str, int]) -> Grid | None:
    """The grid with other constants: by the launch's function, else by the rule."""
    if not _constants(captured, change):
        return captured.grid
    if captured.grid_of is not None:
        x, y, z = (*map(int, captured.grid_of({**captured.arguments, **change})), 1, 1)[:3]
        return x, y, z
    if rule is None:
        return None
    x, y, z = (
        math.prod(-(-factor.size // change.get(factor.constant, factor.value)) for factor in factors)
        for factors in rule
    )
    return x, y, z


def _alternative(
    captured: TritonLaunch,
    change: dict[str, int],
    grid: Grid,
    sms: int,
    walks: tuple[tuple[ProgramAccesses, ...] | str, tuple[ProgramAccesses, ...] | str],
    time: Callable[[TritonLaunch], float] | None,
) -> Alternative:
    launched, changed = walks
    tiles = None
    if not isinstance(launched, str):
        if isinstance(changed, str):
            return Alternative(change, None, refused=changed)
        tiles = tiles_of(changed[0])
        covered = _covered(launched[0], captured.grid, changed[0], grid)
        if not _ENOUGH < covered < 1 / _ENOUGH:
            return Alternative(
                change, None, refused=f"with these tiles the same grid covers only {covered:.0%} of the work"
            )
    try:
        compiled = captured.compile(**change)
        options = {**captured.options, **{k: v for k, v in change.items() if k not in captured.arguments}}
        made = dataclasses.replace(
            captured,
            arguments={**captured.arguments, **_constants(captured, change)},
            options=options,
            grid=grid,
            compiled=compiled,
        )
        record = launch_record(made, sass=False)
    except Exception as error:  # of Triton, LLVM or ptxas
        return Alternative(change, None, refused=f"it does not compile: {str(error).strip().splitlines()[-1]}")
    found, waves = occupancy_and_waves(record, sms)
    if not found.blocks:
        return Alternative(change, record, found, None, tiles, f"no program fits: {', '.join(found.limited_by)}")
    if time is not None and tiles is not None:
        record = dataclasses.replace(record, measured_us=time(made))
    return Alternative(change, record, found, waves, tiles)


def _covered(launched: ProgramAccesses, grid: Grid, changed: ProgramAccesses, changed_grid: Grid) -> float:
    """The elements that the alternative stores (loads, if the kernel stores none) as a share of the launch's."""
    measure = written if written(launched) else read
    whole = measure(launched) * math.prod(grid)
    return measure(changed) * math.prod(changed_grid) / whole if whole else 1.0
