"""What the command line says of a failure, and the exit code that `docs/exit_codes.md` gives it."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import typer

from tilewright.case_names import error_location, is_user_file
from tilewright.records.errors import (
    InputError,
    OutOfMemory,
    StoreError,
    TargetError,
    TilewrightError,
    UsageError,
    disk_is_full,
    traceback_wanted,
    with_advice,
)

INTERRUPTED = 130
_NO_MEMORY = re.compile(r"(?:out of memory|can't allocate memory|not enough memory)\b.*", re.IGNORECASE)
_PACKAGE = str(Path(__file__).parents[1])


def message_of(error: BaseException) -> tuple[str, int]:
    """One message for the user, and the exit code. Raises `error` again if it is a fault whose traceback is wanted."""
    if isinstance(error, (typer.Abort, KeyboardInterrupt)):
        return "interrupted; nothing was left half-written", INTERRUPTED
    if isinstance(error, TilewrightError):
        return str(error), error.exit_code
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return (
            "PyTorch is not installed: pip install torch; trace, sql, report, diff and whatif work without it",
            TilewrightError.exit_code,
        )
    if isinstance(error, SystemExit):
        return f"the model's code ends the program {error_location(error)}", TargetError.exit_code
    # click's own errors of usage carry an exit code and know how to show themselves.
    if hasattr(error, "exit_code") and hasattr(error, "format_message"):
        verb = getattr(getattr(getattr(error, "ctx", None), "command", None), "name", None)
        where = f"tilewright {verb} --help" if verb and verb != "tilewright" else "tilewright --help"
        said = error.format_message().rstrip(".")
        if verb == "bench" and re.search(r"extra argument.*\(\d+(x\d+)+\)", said):
            said = f"{said}: give sizes as --shapes"
        return (
            f"{said}{' ' if said.endswith('?') else '; '}`{where}` has an example" if said else "",
            UsageError.exit_code,
        )
    first = str(error).strip().partition("\n")[0]
    if isinstance(error, MemoryError) or _NO_MEMORY.search(first):
        found = re.search(r"(?<=allocate )[\d.]+ \w+", first)
        asked = f", asked for {found[0]} more" if found else ""
        return f"out of memory{asked}: give smaller --inputs, or a device with more memory", OutOfMemory.exit_code
    if disk_is_full(error):
        return with_advice(f"cannot write {getattr(error, 'filename', None) or 'a file'}", error), StoreError.exit_code
    if isinstance(error, OSError):
        return with_advice(f"cannot use {error.filename or 'a file'}", error), TilewrightError.exit_code
    if traceback_wanted():
        raise error
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if _is_ours(frame) or is_user_file(frame.filename)), frames[-1])
    if not _is_ours(last):
        return f"the model's code fails {error_location(error)}", InputError.exit_code
    place = f"{Path(last.filename).name}:{last.lineno}"
    return (
        f"a fault of tilewright at {place}: {type(error).__name__}: {first}; "
        "TILEWRIGHT_TRACEBACK=1 shows the traceback, please report it"
    ), TilewrightError.exit_code


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_PACKAGE)
