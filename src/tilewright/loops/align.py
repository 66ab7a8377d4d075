"""Gives tensors that share no operator the same loops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tilewright.operators.axes import Axis


def align(domain: frozenset[Axis], together: Sequence[frozenset[Axis]], accesses: Sequence[Mapping[Axis, int]]) -> None:
    """Unify independent axes of equal length: a row sum of one tensor that scales another shares its row loop.

    `together` are axes that one operator varies with, `accesses` the strides of every tensor.
    """
    groups = list(together)
    if domain in groups:
        return
    least = _least_strides(domain, accesses)
    axes = sorted(domain, key=lambda axis: (axis.extent, axis.serial))
    for position, axis in enumerate(axes):
        # Of square tensors the rows must not become the columns of others: one would be read with a stride.
        for other in sorted(axes[:position], key=lambda it: least[it] != least[axis]):
            met = any({axis, other} <= group for group in groups)
            if axis.parts is None and other.parts is None and axis.extent == other.extent and not met:
                axis.parts = (other,)
                groups = [g - {axis} | {other} if axis in g else g for g in groups]


def _least_strides(domain: Iterable[Axis], accesses: Sequence[Mapping[Axis, int]]) -> dict[Axis, int]:
    return {axis: min((it[axis] for it in accesses if it.get(axis)), default=0) for axis in domain}
