"""The size of text in the page, with markup and non-ASCII characters escaped, and cutting it to a budget."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TypeVar

Row = TypeVar("Row")

_SHORTEST = 8


def harmless_json(value: object) -> str:
    """`value` as JSON without characters of markup, so that its text cannot end the script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def cut(text: str, longest: int) -> str:
    """`text`, or its beginning and an ellipsis: at most `longest` characters."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def shortened(texts: Sequence[str], longest: int, budget: int) -> list[str]:
    """Each of `texts` cut to `longest` characters, or to fewer until all take at most `budget` characters of the page.

    >>> shortened(["aten::addmm", "void kernel<float>()"], 40, 40)
    ['aten::addmm', 'void kernel…']
    """
    while True:
        made = [cut(text, longest) for text in texts]
        if longest <= _SHORTEST or len(harmless_json(made)) <= budget:
            return made
        longest = max(longest * 3 // 4, _SHORTEST)


def fitting(rows: Iterable[Row], budget: int) -> list[Row]:
    """The first of `rows` that take at most `budget` characters of the page."""
    left = budget

    def fits(row: Row) -> bool:
        nonlocal left
        left -= len(harmless_json(row)) + 1
        return left >= 0

    return list(takewhile(fits, rows))
