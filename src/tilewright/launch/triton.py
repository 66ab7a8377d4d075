"""Kernels that Triton compiled, as the driver launches them: without Triton's own look at every argument."""

from __future__ import annotations

import contextlib
import functools
import threading
from dataclasses import dataclass
from typing import Any

WARP = 32
POINTERS_LAST = 2
"""Scratch areas of Triton's own, which its kernels take last; the kernels here have none."""


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel on one device: the driver's handle, threads of a program and its shared memory in bytes."""

    name: str
    function: int
    threads: int
    shared_bytes: int


def loaded(compiled: Any) -> LoadedKernel | None:
    """What Triton compiled, loaded on the current device; None where its launch takes more than its parameters."""
    # `run` loads the kernel, and only then `function` is there.
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
    """Let a thread hash Triton's own files, which its cache asks for once a process: 0.8 s, beside Dynamo's tracing."""
    threading.Thread(target=_hash, name="tilewright-triton", daemon=True).start()


def _hash() -> None:
    # If Triton is missing or has no such function, its first user reports that.
    with contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()


@functools.cache
def _settings() -> Any:
    """Triton's settings, cached: an import statement costs the host a microsecond even if the module is loaded."""
    from triton import knobs

    return knobs.runtime
