"""PyTorch has one profiler at a time: a second one crashes it, or empties the first one's tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

_OURS = "_tilewright_starts"


def profiler_runs() -> bool:
    """Whether one of PyTorch's profilers runs in this thread."""
    import torch

    return bool(torch._C._autograd._profiler_enabled())


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
