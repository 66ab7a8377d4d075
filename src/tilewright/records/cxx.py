"""Compiles one source to one shared object with the machine's C++ compiler, once for all processes."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tilewright.records import cache
from tilewright.records.errors import CacheError, CompilerError

ALWAYS = ("-fPIC", "-shared", "-w")
LIMIT_S = 300.0
"""The compiler is stopped after this time (`TILEWRIGHT_COMPILE_LIMIT` overrides it, in seconds)."""


def shared_object(source: str, flags: tuple[str, ...], *platform: str) -> Path:
    """The shared object of `source` compiled with `flags`, from the cache or compiled now.

    `platform` has what else the result depends on: instruction set, versions of headers. A damaged cache entry is
    rebuilt. Raises CompilerError (the compiler is missing, fails or hangs) or CacheError.
    """
    key = cache.key_of(source, *flags, *ALWAYS, *identity(), *platform)
    return cache.build_with_digest(key, ".so", lambda out: compile_to(out, source, flags))


def identity() -> tuple[str, str]:
    """The compiler's path and a fingerprint of its file. Raises CompilerError if it is missing."""
    compiler = find_compiler()
    return compiler, _fingerprint(compiler)


def find_compiler() -> str:
    """The path of $CXX, else of g++. Raises CompilerError if it is missing."""
    wanted = os.environ.get("CXX") or "g++"
    path = shutil.which(wanted)
    if path is None:
        raise CompilerError(f"no C++ compiler: {wanted!r} is not on PATH; install g++ or set CXX")
    return path


def require_compiler() -> None:
    """Compile an empty source. Raises CompilerError (the compiler is missing, fails or hangs) or CacheError."""
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        compile_to(Path(folder) / "empty.so", "", ())


def compile_to(out: Path, source: str, flags: tuple[str, ...]) -> None:
    """Write the shared object of `source` to `out`. Raises CompilerError, or CacheError if the disk is full."""
    compiler, limit = find_compiler(), _limit_s()
    # The linker searches a library for symbols of earlier objects only, so the source comes first.
    command = [compiler, "-x", "c++", "-", *flags, *ALWAYS, "-o", str(out)]
    process, at_exit = None, _nothing
    try:
        with _interrupts_wait():
            # In its own session, so that the compiler's child processes are stopped with it.
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
            # A thread that waits for the compiler does not notice when the interpreter exits. Each entry needs its own
            # function: `unregister` removes all entries of one, and two compilers may run.
            at_exit = atexit.register(functools.partial(_kill, process))
        output, _ = process.communicate(source, timeout=limit)
    except subprocess.TimeoutExpired:
        assert process is not None
        _stop(process)
        raise CompilerError(
            f"{compiler} did not finish in {limit:g} s and was stopped; TILEWRIGHT_COMPILE_LIMIT gives it more"
        ) from None
    except BaseException as error:
        if process is not None:
            _stop(process)
        elif isinstance(error, OSError):
            raise CompilerError(f"{compiler} does not start: {error.strerror or error}") from error
        raise
    finally:
        atexit.unregister(at_exit)
    if process.returncode:
        if "No space left on device" in output:
            raise CacheError(f"no space left for {out}")
        first = next((line for line in output.splitlines() if "error" in line), output.strip()[:300])
        raise CompilerError(f"{compiler} failed with exit code {process.returncode}: {first}")


@functools.cache
def _fingerprint(compiler: str) -> str:
    stat = os.stat(os.path.realpath(compiler))
    return f"{os.path.realpath(compiler)} {stat.st_size} {stat.st_mtime_ns}"


def _limit_s() -> float:
    wanted = os.environ.get("TILEWRIGHT_COMPILE_LIMIT")
    try:
        return float(wanted) if wanted else LIMIT_S
    except ValueError:
        raise CompilerError(f"TILEWRIGHT_COMPILE_LIMIT={wanted} is no number of seconds") from None


def _nothing() -> None:
    pass


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Delay Ctrl-C: raised within `Popen`, it would leave a running compiler without a handle to stop it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    handler = signal.signal(signal.SIGINT, lambda *given: arrived.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if handler is None else handler)
        if arrived and callable(handler):
            handler(*arrived[0])


def _stop(process: subprocess.Popen[str]) -> None:
    _kill(process)
    process.wait()
    for stream in (process.stdin, process.stdout):
        # Closing flushes the rest of the source into a broken pipe.
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
