"""Progress of long computations: counts that are passed to an observer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Observer = Callable[[str, int, int | None], None]
"""Called with the name of what is counted, the number done, and the total if it is known."""

_observers: list[Observer] = []


def tell(what: str, done: int, of: int | None = None) -> None:
    """Report that `done` of `of` are done; does nothing without an observer.

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
    """Call `observer` with the counts that are reported inside."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
