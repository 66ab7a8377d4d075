"""Which integers of a nest fit 32 bits. The loop language computes all indices in 64 bits.

On a GPU a 64-bit addition or comparison takes two instructions, a product four; on a CPU a vector holds half as many.
The gradient of a max pool is made of them: of 34 × 16 × 32 × 32 it took 2.7 ms on one core in 64 bits, 0.8 in 32.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.loops.nest import Nest, Step
from tilewright.operators.ranges import STORED, Range, computed

NARROW = STORED["int32"]
HELD = {dtype: held for dtype, held in STORED.items() if dtype != "int64"}


def ranges_of(nest: Nest) -> dict[int, Range]:
    """The least and the largest value of steps that are computed from positions, constants and narrow integers."""
    found: dict[int, Range] = {}
    for place, step in enumerate(nest.steps):
        given = [found[a] for a in step.args if a in found]
        known = _range(nest, step, given if len(given) == len(step.args) else None)
        if known is not None:
            found[place] = known
    return found


def narrow_steps(nest: Nest) -> frozenset[int]:
    """Positions of the 64-bit steps whose values, and those of their operands, fit 32 bits."""
    found: set[int] = set()
    for place, (least, most) in sorted(ranges_of(nest).items()):
        step = nest.steps[place]
        wide = any(nest.steps[a].dtype == "int64" and a not in found for a in step.args)
        if step.dtype == "int64" and NARROW[0] <= least and most <= NARROW[1] and not wide:
            found.add(place)
    return frozenset(found)


def far_loads(nest: Nest) -> frozenset[int]:
    """Positions of the loads at computed indices whose place may not fit 32 bits."""
    ranges = ranges_of(nest)
    loads = ((i, step) for i, step in enumerate(nest.steps) if step.name == "load" and step.access and step.access.by)
    return frozenset(i for i, step in loads if not fits_with(nest, step, ranges))


def fits_with(nest: Nest, load: Step, ranges: dict[int, Range]) -> bool:
    """Whether the place that `load` reads, computed indices included, fits 32 bits."""
    assert load.access is not None
    extents = nest.rows + nest.cols
    farthest = abs(load.access.offset)
    farthest += sum((n - 1) * abs(s) for n, s in zip(extents, load.access.strides, strict=True))
    for argument, stride in zip(load.args, load.access.by, strict=False):
        farthest += max(map(abs, ranges.get(argument, NARROW))) * abs(stride)
    return farthest <= NARROW[1]


def _range(nest: Nest, step: Step, given: Sequence[Range] | None) -> Range | None:
    if step.name == "index":
        assert step.strides is not None
        ends = [(n - 1) * s for n, s in zip(nest.rows + nest.cols, step.strides, strict=True)]
        return sum(min(end, 0) for end in ends), sum(max(end, 0) for end in ends)
    if step.name == "const":
        return (int(step.constant), int(step.constant)) if isinstance(step.constant, int) else None
    if step.name == "load":
        assert step.access is not None
        return HELD.get(nest.buffers[step.access.buffer].dtype)
    if step.dtype == "bool":
        return HELD["bool"]
    found = computed(step.name, given) if given is not None and step.dtype in STORED else None
    held = HELD.get(step.dtype)
    return found if found is None or held is None or (held[0] <= found[0] and found[1] <= held[1]) else held
