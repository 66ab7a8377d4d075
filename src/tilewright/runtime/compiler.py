"""Generated C++ as a library of this process: compiled for the machine's own instruction set, loaded once."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import tempfile
from pathlib import Path

from tilewright.launch import cxx
from tilewright.records import cache
from tilewright.records.errors import CacheError, CompilerError, warn_once


def has_libmvec(libc: str, version: str) -> bool:
    """Whether this C library has vector forms of all functions that `prelude.h` declares.

    >>> has_libmvec("glibc", "2.36"), has_libmvec("glibc", "2.31"), has_libmvec("", "")
    (True, False, False)
    """
    return libc == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)


WIDEST = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
"""g++ takes 256 bits on most machines that have 512: cross entropy of 124 × 2000 logits took 173 µs so, and 113 now."""
VECTORS = ("-DTW_LIBMVEC",) if WIDEST and has_libmvec(*platform.libc_ver()) else ()
"""Sines of 1024 × 1024 took 7.7 ms without (one core), eager's 0.5."""
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
    *WIDEST, *VECTORS,
)  # fmt: skip
"""No product is contracted into a sum: fp32 rounds where eager rounds, a value that backward computes again is
the value forward had, and what cancels in eager cancels here. Zeros keep their signs: without them g++ 12
compiles some masked sums wrongly (`tests/fuzz/test_found.py`)."""

_loaded: dict[str, ctypes.CDLL] = {}
"""The libraries of this process."""


def load(source: str) -> ctypes.CDLL:
    """The library compiled from `source`: this process's, else the cache's, else compiled now. A damaged cache entry is
    rebuilt; if the cache cannot be used, a warning says so and the library is compiled for this process alone. Raises
    CompilerError (no compiler, one that fails, one that hangs).
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
