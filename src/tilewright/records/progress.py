"""What a long computation has done so far, told to whoever shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Observer = Callable[[str, int, int | None], None]
"""Called with what is being counted, how many are done, and of how many, where that is known."""

_observers: list[Observer] = []


def tell(what: str, done: int, of: int | None = None) -> None:
    """Say that `done` of `of` are done; nothing happens where nobody watches.

    >>> with watched(lambda what, done, of: print(f"{done} of {of} {what}")):
    ...     tell("kernels compiled", 3, 12)
    3 of 12 kernels compiled
    """
    if _observers:
        _observers[-1](what, done, of)


def is_watched() -> bool:
    return bool(_observers)


@contextmanager
def watched(observer: Observer) -> Iterator[None]:
    """Give `observer` what is told inside."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
