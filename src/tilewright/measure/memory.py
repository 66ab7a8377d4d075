"""Peak live memory of a call: PyTorch's allocations and tilewright's pools on one timeline."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    import torch

_MARK = "tilewright.pool_live_bytes="


class PoolMeter:
    """A registered memory pool; made by `register_pool`."""

    def __init__(self, live_bytes: Callable[[], int]) -> None:
        self.live_bytes = live_bytes

    def changed(self) -> None:
        """The pool calls this after its live bytes changed, on the thread that changed them.

        One comparison unless `peak_bytes` is running.
        """
        if _recording:
            _mark_pools()


_pools: list[PoolMeter] = []
_recording = False
_one_at_a_time = threading.Lock()


def register_pool(live_bytes: Callable[[], int]) -> PoolMeter:
    """Count a pool of host memory that bypasses PyTorch's allocator.

    `live_bytes()` returns the bytes in use now, without the pool's free blocks. The pool calls `changed()` on
    the meter after each change. A pool that allocates from PyTorch must not be registered: it would count twice.
    """
    meter = PoolMeter(live_bytes)
    _pools.append(meter)
    return meter


def peak_bytes(function: Callable[[], object], device: str = "cpu") -> int:
    """Peak of live bytes during `function()`, minus the live bytes at its start.

    `device` is `cpu`, `cuda` or `cuda:N`. The result counts as live until the call has returned.
    On CUDA this reads the caching allocator's statistics (and resets its peak): blocks in use, rounded up
    to 512 B. On the CPU it replays each allocation and release that PyTorch's profiler reports, together with
    registered pools. Not counted there: allocations on other threads, allocations of libraries that bypass
    PyTorch's allocator, and releases of tensors older than the call, so a call that releases its inputs is
    counted as if it kept them.

    Call `function` once before, or one-off allocations count too. Exceptions of `function` pass through.
    """
    with _one_at_a_time, _no_collection():
        return _cuda_peak(function, device) if device.split(":")[0] == "cuda" else _cpu_peak(function)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection: releases of earlier calls' garbage would count for this call."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _cuda_peak(function: Callable[[], object], device: str) -> int:
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = int(torch.cuda.memory_allocated(device))
    result = function()
    torch.cuda.synchronize(device)
    del result
    return int(torch.cuda.max_memory_allocated(device)) - before


def _cpu_peak(function: Callable[[], object]) -> int:
    # At its default log level Kineto prints a line at each start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    from torch.profiler import ProfilerActivity, profile

    global _recording
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        _mark_pools()
        _recording = True
        try:
            result = function()
        finally:
            _recording = False
        del result
    return _replay(sorted(_steps(profiler)))


def _mark_pools() -> None:
    """Record the pools' live bytes as a profiler event, so that one clock orders both."""
    from torch.profiler import record_function

    with record_function(f"{_MARK}{sum(pool.live_bytes() for pool in _pools)}"):
        pass


class _Block(Protocol):
    """The profiler's record of an allocation, or of a release if the size is negative."""

    device: torch.device
    ptr: int
    alloc_size: int


class _Step(NamedTuple):
    """One change of live bytes: a PyTorch block (`pointer` set), or the new sum over the pools."""

    time_ns: int
    nbytes: int
    pointer: int


def _steps(profiler: torch.profiler.profile) -> Iterator[_Step]:
    session = profiler.profiler
    assert session is not None and session.kineto_results is not None, "a profile that ended has results"
    pending = list(session.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.name == "[memory]":
            block = cast(_Block, event.extra_fields)
            # Blocks of a GPU are reported too.
            if block.device.type == "cpu":
                yield _Step(event.start_time_ns, block.alloc_size, block.ptr)
        elif event.name.startswith(_MARK):
            yield _Step(event.start_time_ns, int(event.name.removeprefix(_MARK)), 0)


def _replay(steps: list[_Step]) -> int:
    """The peak over `steps` in order of time; the first event of the pools sets their zero."""
    blocks: dict[int, int] = {}
    allocated = pooled = peak = 0
    pooled_before: int | None = None
    for step in steps:
        if not step.pointer:
            pooled_before = step.nbytes if pooled_before is None else pooled_before
            pooled = step.nbytes - pooled_before
        elif step.nbytes > 0:
            blocks[step.pointer] = step.nbytes
            allocated += step.nbytes
        else:
            # PyTorch also reports releases of blocks that were allocated before this profile; ignore those.
            allocated -= blocks.pop(step.pointer, 0)
        peak = max(peak, allocated + pooled)
    return peak
