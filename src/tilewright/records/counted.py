"""Numbers with their nouns."""

from __future__ import annotations


def counted(count: float, noun: str) -> str:
    """A count, rounded, with the noun in its number.

    >>> counted(1, "step"), counted(2000, "whole step"), counted(0, "launch"), counted(3, "copy")
    ('1 step', '2,000 whole steps', '0 launches', '3 copies')
    """
    text = f"{count:,.0f}"
    if text == "1":
        return f"1 {noun}"
    return f"{text} " + (f"{noun[:-1]}ies" if noun.endswith("py") else f"{noun}{'es' if noun[-1] in 'sh' else 's'}")
