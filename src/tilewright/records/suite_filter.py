"""The part of a suite that a bench runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.records.case import DTYPES
from tilewright.records.errors import UsageError
from tilewright.records.measurement import Direction

DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd", "fwd+bwd")


@dataclass(frozen=True)
class SuiteFilter:
    """The part of a suite to run; an empty field does not restrict it."""

    impls: Sequence[str] = ()
    shapes: Sequence[tuple[int, ...]] = ()
    dtypes: Sequence[str] = ()
    directions: Sequence[str] = ()
    sweep: str = ""
    shard: tuple[int, int] = (1, 1)
    """(i, n): every n-th race, starting with the i-th, counted from 1."""

    @staticmethod
    def parse(
        *, impl: str = "", shapes: str = "", dtype: str = "", direction: str = "", sweep: str = "", shard: str = "1/1"
    ) -> SuiteFilter:
        """The filter that the command line's options describe: commas separate items, `x` separates sizes.

        >>> SuiteFilter.parse(shapes="100x5000,8x9", dtype="bf16", shard="2/3")
        SuiteFilter(impls=[], shapes=[(100, 5000), (8, 9)], dtypes=['bfloat16'], directions=[], sweep='', shard=(2, 3))
        """
        unknown = [name for name in _items(dtype) if name not in DTYPES]
        if unknown:
            raise UsageError(f"no dtype {', '.join(unknown)}; known: {', '.join(DTYPES)}")
        unknown = [name for name in _items(direction) if name not in DIRECTIONS]
        if unknown:
            raise UsageError(f"no direction {', '.join(unknown)}; known: {', '.join(DIRECTIONS)}")
        return SuiteFilter(
            _items(impl),
            [_shape(text) for text in _items(shapes)],
            [DTYPES[name] for name in _items(dtype)],
            _items(direction),
            sweep,
            _shard(shard),
        )


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise UsageError(f"shape {text!r} is not of the form 100x5000")
    return tuple(int(size) for size in text.split("x"))


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"shard {text!r} is not of the form I/N with 1 ≤ I ≤ N")
    return int(match[1]), int(match[2])
