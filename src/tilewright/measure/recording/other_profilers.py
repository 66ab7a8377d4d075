"""PyTorch has one profiler at a time: a second one crashes it, or empties the first one's tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from tilewright.records.errors import UsageError

_OURS = "_tilewright_starts"


def refuse_second() -> None:
    """Raise UsageError if one of PyTorch's profilers runs in this thread."""
    from tilewright.pytorch.state import profiled

    if profiled():
        raise UsageError(
            "a profiler of PyTorch's runs already, and there can be one at a time: end it first, "
            "or load its trace with `tilewright trace`"
        )


@contextmanager
def starting_our_own() -> Iterator[None]:
    """While inside, `noticed` ignores profilers that start."""
    from torch.autograd.profiler import profile

    setattr(profile, _OURS, True)
    try:
        yield
    finally:
        delattr(profile, _OURS)


@contextmanager
def noticed(before: Callable[[], None]) -> Iterator[None]:
    """While inside, `before` is called each time that the program is about to start one of PyTorch's profilers."""
    from torch.autograd.profiler import profile

    prepare = profile._prepare_trace

    @wraps(prepare)
    def prepared(profiler: Any) -> None:
        if not getattr(profile, _OURS, False):
            before()
        prepare(profiler)  # type: ignore[no-untyped-call]

    profile._prepare_trace = prepared  # type: ignore[method-assign]
    try:
        yield
    finally:
        profile._prepare_trace = prepare  # type: ignore[method-assign]
