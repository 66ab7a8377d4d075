"""The exceptions that users see, each with its documented exit code, and one-line warnings."""

from __future__ import annotations

import errno
import os
import sys
import traceback

_warned: set[str] = set()
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def warn_once(line: str) -> None:
    """Print `line` on standard error, once per process."""
    if line not in _warned:
        _warned.add(line)
        print(f"tilewright: {line}", file=sys.stderr, flush=True)


def with_advice(what: str, error: BaseException) -> str:
    """`cannot write …: No space left on device; free some space …`: `what`, why, and on a full disk what to do."""
    why = (error.strerror if isinstance(error, OSError) else None) or str(error).partition("\n")[0]
    advice = "; free some space, or name a file or set TILEWRIGHT_HOME to a folder on another disk"
    return f"{what}: {why}{advice if disk_is_full(error) else ''}"


def disk_is_full(error: BaseException) -> bool:
    """Whether a file could not grow. DuckDB's errors quote the system's text, without its number."""
    return any(os.strerror(number) in str(error) for number in _FULL)


def strict() -> bool:
    """Whether what is left to PyTorch, or out of a plan, is an error: `TILEWRIGHT_STRICT=1`."""
    return os.environ.get("TILEWRIGHT_STRICT") == "1"


def traceback_wanted() -> bool:
    """Whether tracebacks are shown that messages replace: `TILEWRIGHT_TRACEBACK=1`."""
    return os.environ.get("TILEWRIGHT_TRACEBACK") == "1"


def shown_cause(error: BaseException | None) -> BaseException | None:
    """What to raise a TilewrightError from whose message says what `error` says in a page of PyTorch's own frames.

    None, unless tracebacks are wanted: Python then prints the new error alone, and keeps `error` as its `__context__`.
    """
    return error if traceback_wanted() else None


class Refusal(Exception):
    """Why a call that could be rewritten stays as it is; becomes a decision's reason."""


class TilewrightError(Exception):
    """A failure with a message for the user. `exit_code` is the exit status of the command line."""

    exit_code = 1

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        cls.exit_code = cls.exit_code if exit_code is None else exit_code

    def _render_traceback_(self, *_: object) -> list[str]:
        """What a notebook shows: the message; with `TILEWRIGHT_TRACEBACK=1` the traceback, too."""
        if traceback_wanted():
            return "".join(traceback.format_exception(self)).splitlines()
        return f"{type(self).__name__}: {self}".splitlines()


class UsageError(TilewrightError, exit_code=2):
    """The command line or a specification could not be understood."""


class TargetError(TilewrightError, exit_code=3):
    """The named file, module or object does not exist, or is not a case, module or function."""


class InputError(TilewrightError, exit_code=4):
    """The model does not accept the inputs it was given."""


class CaptureError(TilewrightError, exit_code=5):
    """The program could not be captured as one graph (graph break, data-dependent shape)."""


class CompilerError(TilewrightError, exit_code=6):
    """The C++ compiler is missing, failed, or did not finish in time."""


class KernelError(CompilerError):
    """One generated kernel of a graph does not compile."""

    def __init__(self, kernel: str, message: str) -> None:
        super().__init__(message)
        self.kernel = kernel


class OutOfMemory(TilewrightError):
    """The machine or the device has too little memory."""


class CacheError(TilewrightError, exit_code=7):
    """The cache directory cannot be used."""


class VerificationError(TilewrightError, exit_code=8):
    """The optimised program broke the numbers contract."""


class StoreError(TilewrightError, exit_code=9):
    """A run database is missing, damaged, or refuses the query."""


class TraceError(TilewrightError, exit_code=10):
    """A trace cannot be read."""


def first_line(error: BaseException) -> str:
    """The message of an error without what follows its first line, such as hints; its class if it has no message."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()
