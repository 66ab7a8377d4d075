"""Compiles generated C++ for this machine's instruction set and loads it, once a process."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import tempfile
from pathlib import Path

from tilewright.records import cache, cxx
from tilewright.records.errors import CacheError, CompilerError, warn_once


def has_libmvec(libc: str, version: str) -> bool:
    """Whether this C library has vector versions of all functions that `libmvec.h` declares.

    >>> has_libmvec("glibc", "2.36"), has_libmvec("glibc", "2.31"), has_libmvec("", "")
    (True, False, False)
    """
    return libc == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)


WIDEST = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
"""g++ prefers 256-bit vectors even if the machine has 512: cross entropy of 124 × 2000 logits took 173 µs, now 113."""
VECTORS = ("-DTW_LIBMVEC",) if WIDEST and has_libmvec(*platform.libc_ver()) else ()
"""Without it, sines of 1024 × 1024 took 7.7 ms on one core; eager takes 0.5."""
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
    "-fno-tree-pre", *WIDEST, *VECTORS,
)  # fmt: skip
"""No fused multiply-add: fp32 rounds where eager rounds, a value that backward recomputes equals forward's, and terms
that cancel in eager cancel here. Signed zeros stay on: without them g++ 12 compiles some masked sums wrongly
(`tests/fuzz/test_found.py`). No elimination of partial redundancies: it makes branches of a window's comparisons, and
g++ 12 leaves the loop scalar (2 × 2 pooling of 29 × 16 × 32 × 32 took 3.5 ms on one core, now 0.14)."""

_loaded: dict[str, ctypes.CDLL] = {}
"""The libraries that this process has loaded, by key."""


def load(source: str) -> ctypes.CDLL:
    """The library compiled from `source`, which is loaded, in the cache, or compiled now. A damaged cache entry is
    rebuilt. If the cache cannot be used, a warning says so, and the library is compiled for this process alone. Raises
    CompilerError (the compiler is missing, fails or hangs).
    """
    key = cache.key_of(source)
    if key not in _loaded:
        try:
            _loaded[key] = _open(cxx.shared_object(source, FLAGS, _instruction_set()))
        except CacheError as error:
            warn_once(f"kernels are compiled for this process alone: {error}")
            with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
                path = Path(folder) / "kernels.so"
                cxx.compile_to(path, source, FLAGS)
                _loaded[key] = _open(path)
    return _loaded[key]


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompilerError(f"the compiled library does not load: {error}") from error


@functools.cache
def _instruction_set() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return os.uname().machine
    return next((line for line in lines if line.startswith(("flags", "Features"))), os.uname().machine)
