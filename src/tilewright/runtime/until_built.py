"""What a program's calls run until the executor in C++ is built."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tilewright.launch.executor import EXTENSION

TRIES = 2
"""Calls of each of both that are timed. The first one of each also checks, allocates and faults in pages."""


def faster_until_built(
    compiled: Callable[..., Any],
    eager: Callable[[], Callable[..., Any]],
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[..., Any]:
    """`compiled`, but PyTorch's graph while the executor is built if that takes less time.

    Until then the steps of a compiled program run in Python, which takes the host longer than eager's calls: a tiny
    model 1.06 ms (eager 0.81), though a large one gains all the same. Before the build, calls run `compiled` and are
    timed; during it each of both is timed until it has had `TRIES` calls, then the faster one runs. In training only
    forward is timed.
    """
    tried: Counter[bool] = Counter()
    least: dict[bool, float] = {}

    def call(*args: Any) -> Any:
        if EXTENSION.found is not None:
            return compiled(*args)
        is_eager = False
        if EXTENSION.is_building:
            untimed = [choice for choice in (False, True) if tried[choice] < TRIES]
            is_eager = untimed[0] if untimed else least[True] < least[False]
        run = eager() if is_eager else compiled
        begin = clock()
        results = run(*args)
        tried[is_eager] += 1
        least[is_eager] = min(clock() - begin, least.get(is_eager, float("inf")))
        return results

    return call
