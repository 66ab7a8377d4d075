"""g++ on one source, once: the shared library comes from the disk cache when it is there."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from tilewright.records import cache
from tilewright.records.errors import CacheError, CompilerError, say_once

FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=off", "-fPIC", "-shared", "-w",
)  # fmt: skip
"""No product is contracted into a sum: fp32 rounds where eager rounds, a value that backward computes again is
the value forward had, and what cancels in eager cancels here. Zeros keep their signs: without them g++ 12
compiles some masked sums wrongly (`tests/fuzz/test_found.py`)."""
LIMIT_S = 120.0
"""A compiler that has not finished by then is stopped (`TILEWRIGHT_COMPILE_LIMIT` overrides, in seconds)."""


_loaded: dict[str, ctypes.CDLL] = {}
"""The libraries of this process."""


def load(source: str) -> ctypes.CDLL:
    """The library compiled from `source`: this process's, else the cache's, else made now.

    A damaged cache entry is built again; where the cache cannot be used, that is said and the library
    is made for this process alone. Raises CompilerError (no compiler, one that fails, one that hangs).
    """
    compiler = find_compiler()
    key = cache.key_of(source, " ".join(FLAGS), compiler, _fingerprint(compiler), _instruction_set())
    if key not in _loaded:
        try:
            _loaded[key] = _load_cached(key, lambda out: _compile(compiler, source, out))
        except CacheError as error:
            say_once(f"kernels are compiled for this process alone: {error}")
            with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
                path = Path(folder) / "kernels.so"
                _compile(compiler, source, path)
                _loaded[key] = _open(path)
    return _loaded[key]


def _load_cached(key: str, make: Callable[[Path], None]) -> ctypes.CDLL:
    def make_sealed(path: Path) -> None:
        make(path)
        cache.seal(path, key)

    for _ in range(2):
        path = cache.build(key, ".so", make_sealed)
        if cache.intact(path, key):
            return _open(path)
        cache.discard(path)
    raise CacheError(f"the cache entry {path} does not hold what was written to it")


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise CompilerError(f"the compiled library does not load: {error}") from error


def find_compiler() -> str:
    wanted = os.environ.get("CXX") or "g++"
    path = shutil.which(wanted)
    if path is None:
        raise CompilerError(f"no C++ compiler: {wanted!r} is not on PATH; install g++ or set CXX")
    return path


@functools.cache
def _fingerprint(compiler: str) -> str:
    stat = os.stat(os.path.realpath(compiler))
    return f"{os.path.realpath(compiler)} {stat.st_size} {stat.st_mtime_ns}"


@functools.cache
def _instruction_set() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return os.uname().machine
    return next((line for line in lines if line.startswith(("flags", "Features"))), os.uname().machine)


def _compile(compiler: str, source: str, out: Path) -> None:
    limit = _limit_s()
    command = [compiler, *FLAGS, "-x", "c++", "-", "-o", str(out)]
    try:
        # A session of its own, so that the compiler's own children are stopped with it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise CompilerError(f"{compiler} does not start: {error.strerror or error}") from error
    try:
        output, _ = process.communicate(source, timeout=limit)
    except subprocess.TimeoutExpired:
        _stop(process)
        raise CompilerError(
            f"{compiler} did not finish in {limit:g} s and was stopped; TILEWRIGHT_COMPILE_LIMIT gives it more"
        ) from None
    except BaseException:
        _stop(process)
        raise
    if process.returncode == 0:
        return
    if "No space left on device" in output:
        raise CacheError(f"no space left for {out}")
    first = next((line for line in output.splitlines() if "error" in line), output.strip()[:300])
    raise CompilerError(f"{compiler} failed with exit code {process.returncode}: {first}")


def _limit_s() -> float:
    wanted = os.environ.get("TILEWRIGHT_COMPILE_LIMIT")
    try:
        return float(wanted) if wanted else LIMIT_S
    except ValueError:
        raise CompilerError(f"TILEWRIGHT_COMPILE_LIMIT={wanted} is no number of seconds") from None


def _stop(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        # What was not yet written to the compiler has nowhere to go.
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()
