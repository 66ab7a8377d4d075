"""g++ on one source, once: the shared library comes from the disk cache when it is there."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import signal
import subprocess
from pathlib import Path

from tilewright.records import cache
from tilewright.records.errors import CompilerError

FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros",
    "-ffp-contract=fast", "-fPIC", "-shared", "-w",
)  # fmt: skip
LIMIT_S = 120.0
"""A compiler that has not finished by then is stopped (`TILEWRIGHT_COMPILE_LIMIT` overrides, in seconds)."""


def load(source: str) -> ctypes.CDLL:
    """The library compiled from `source`. A damaged cache entry is built again.

    Raises CompilerError (no compiler, one that fails, one that hangs) or CacheError.
    """
    compiler = find_compiler()
    key = cache.key_of(source, " ".join(FLAGS), compiler, _fingerprint(compiler), _instruction_set())
    for attempt in (1, 2):
        path = cache.build(key, ".so", lambda out: _compile(compiler, source, out))
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            cache.discard(path)
            if attempt == 2:
                raise CompilerError(f"{compiler} made a library that does not load: {error}") from error
    raise AssertionError


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
    limit = float(os.environ.get("TILEWRIGHT_COMPILE_LIMIT") or LIMIT_S)
    command = [compiler, *FLAGS, "-x", "c++", "-", "-o", str(out)]
    # A session of its own, so that the compiler's own children are stopped with it.
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(source, timeout=limit)
    except subprocess.TimeoutExpired:
        _stop(process)
        raise CompilerError(f"{compiler} did not finish in {limit:g} s and was stopped") from None
    except BaseException:
        _stop(process)
        raise
    if process.returncode != 0:
        first = next((line for line in output.splitlines() if "error" in line), output.strip()[:300])
        raise CompilerError(f"{compiler} failed with exit code {process.returncode}: {first}")


def _stop(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
