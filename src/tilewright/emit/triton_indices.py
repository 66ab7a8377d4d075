"""Which integers of a nest fit 32 bits: places computed from positions, which the loop language has in 64.

A 64-bit addition or comparison takes two instructions, a product four; the gradient of a max pool is made of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.loops.nest import Nest, Step

Range = tuple[int, int]
NARROW = (-(2**31), 2**31 - 1)
STORED = {"bool": (0, 1), "uint8": (0, 255), "int8": (-128, 127), "int16": (-(2**15), 2**15 - 1), "int32": NARROW}
"""What a buffer of these can hold."""


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
    """Positions of the 64-bit steps whose values fit 32 bits."""
    return frozenset(
        place
        for place, (least, most) in ranges_of(nest).items()
        if nest.steps[place].dtype == "int64" and NARROW[0] <= least and most <= NARROW[1]
    )


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
        return STORED.get(nest.buffers[step.access.buffer].dtype)
    if step.dtype == "bool":
        return STORED["bool"]
    if given is None or step.dtype not in ("int64", *STORED):
        return None
    return _combined(step, given)


def _combined(step: Step, given: Sequence[Range]) -> Range | None:
    if step.name == "where":
        return min(given[1][0], given[2][0]), max(given[1][1], given[2][1])
    low, high = given[0]
    if step.name == "cast":
        within = STORED.get(step.dtype)
        return (low, high) if within is None or (within[0] <= low and high <= within[1]) else within
    if step.name == "neg":
        return -high, -low
    if len(given) < 2:
        return None
    other = given[1]
    ends = [low * end for end in other] + [high * end for end in other]
    if step.name == "idiv":
        # Triton rounds towards zero.
        return (min(low, 0) // other[0], max(high, 0) // other[0]) if other[0] == other[1] > 0 else None
    found: dict[str, Range] = {
        "add": (low + other[0], high + other[1]),
        "sub": (low - other[1], high - other[0]),
        "mul": (min(ends), max(ends)),
        "maximum": (max(low, other[0]), max(high, other[1])),
        "minimum": (min(low, other[0]), min(high, other[1])),
    }
    return found.get(step.name)
