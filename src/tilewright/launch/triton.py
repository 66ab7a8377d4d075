"""Compiled Triton kernels for launches through the driver, without Triton's inspection of every argument."""

from __future__ import annotations

import contextlib
import functools
import threading
from dataclasses import dataclass
from typing import Any

WARP = 32
POINTERS_LAST = 2
"""The last parameters of every Triton kernel: pointers to scratch memory, null for kernels that need none."""


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel on one device: the driver's handle, threads per program, shared memory in bytes."""

    name: str
    function: int
    threads: int
    shared_bytes: int


def loaded(compiled: Any) -> LoadedKernel | None:
    """A kernel that Triton compiled, loaded on the current device; None if it needs scratch or a special launch."""
    # Reading `run` loads the kernel and sets `function`.
    _ = compiled.run
    meta = compiled.metadata
    more = meta.global_scratch_size, meta.profile_scratch_size, meta.launch_cooperative_grid, meta.launch_pdl
    if any(more) or meta.num_ctas != 1:
        return None
    return LoadedKernel(meta.name, int(compiled.function), WARP * meta.num_warps, meta.shared)


def launches_are_watched() -> bool:
    """Whether a hook on Triton's launches is installed."""
    runtime = _settings()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@functools.cache
def is_interpreted() -> bool:
    """Whether Triton was imported to interpret its kernels (`TRITON_INTERPRET=1`)."""
    return bool(_settings().interpret)


def hash_ahead() -> None:
    """Hash Triton's files in a thread while Dynamo traces: Triton's cache needs the hash once a process, 0.8 s."""
    threading.Thread(target=_hash, name="tilewright-triton", daemon=True).start()


def _hash() -> None:
    # If Triton is missing or has no such function, the first use of Triton reports it.
    with contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()


@functools.cache
def _settings() -> Any:
    """Triton's settings, cached: an import statement costs the host a microsecond even if the module is loaded."""
    from triton import knobs

    return knobs.runtime
