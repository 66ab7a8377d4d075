"""What a program's calls run until the executor in C++ is built."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tilewright.hardware.target import Target
from tilewright.launch.executor import EXTENSION
from tilewright.records.errors import strict

TRIES = 2
"""Calls of each of both that are timed. The first one of each also checks, allocates and faults in pages."""


def once_built(
    compiled: Callable[..., Any], eager: Callable[[], Callable[..., Any]], target: Target, is_recorded: bool
) -> Callable[..., Any]:
    """Until the executor is built, PyTorch's graph on a GPU, and on a CPU where that is faster; then `compiled`.

    Its steps in Python take the host longer than eager's (on a GPU, a token at batch 1: 12.4 ms, eager 4.2, with the
    executor 0.61). A program that `is_recorded` waits for the executor, since its calls will be verified and measured;
    in the strict mode one on a GPU waits, too, and one on a CPU runs in Python.
    """
    if target.is_gpu and not target.is_present:
        return compiled
    if target.is_gpu or is_recorded:
        EXTENSION.module()
    if is_recorded or (target.is_gpu and strict()):
        EXTENSION.wait()
    if not target.is_gpu:
        return compiled if is_recorded or strict() or EXTENSION.found else faster_until_built(compiled, eager)
    if not EXTENSION.is_building:
        return compiled

    def call(*args: Any) -> Any:
        return (eager() if EXTENSION.is_building else compiled)(*args)

    return call


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
