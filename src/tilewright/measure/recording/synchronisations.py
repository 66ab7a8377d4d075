"""Marks each synchronisation in a profile with the line of the user's program that made the host wait.

PyTorch's profiler names a Python function by the line of its `def`. CUDA's sync debug mode
(`torch.cuda.set_sync_debug_mode`) issues a Python warning in every operator that waits for the device, from which
the calling line is known. The three `synchronize` functions, which are not operators, are wrapped.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

from tilewright.measure.recording.compilation import Replacements
from tilewright.measure.recording.line_tracer import is_user_file
from tilewright.measure.recording.ranges import Marker
from tilewright.records.errors import warn_once
from tilewright.records.notebook import cell_of

MARK = "synchronisation at "
"""Prefix of a mark in the trace; `file:line` follows. The mark is right after the wait."""
_WARNING = "called a synchronizing CUDA operation"
_SYNCHRONIZE = (("", "synchronize"), ("Stream", "synchronize"), ("Event", "synchronize"))
"""Class in `torch.cuda`, or "", and name of the functions that wait."""


@contextmanager
def marked_synchronisations(mark: Marker, replacements: Replacements) -> Iterator[None]:
    """Mark every synchronisation of this process while inside; does nothing without a GPU.

    Other warnings are shown as usual. If the user has set a sync debug mode it is kept, and only calls of
    `synchronize` are marked.
    """
    import torch

    if not torch.cuda.is_available():
        yield
        return
    with ExitStack() as stack:
        if torch.cuda.get_sync_debug_mode() == 0:
            stack.enter_context(_warnings_as_marks(mark))
            stack.callback(torch.cuda.set_sync_debug_mode, 0)
            torch.cuda.set_sync_debug_mode("warn")
        for owner, name in _SYNCHRONIZE:
            place = getattr(torch.cuda, owner) if owner else torch.cuda
            stack.enter_context(replacements.attribute(place, name, _marked(getattr(place, name), mark)))
        yield


@contextmanager
def _warnings_as_marks(mark: Marker) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{_WARNING}")
        # PyTorch warns once that the mode is a prototype without all of `torch.distributed` and `torch.sparse`.
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **options: Any) -> None:
            if _WARNING in str(message):
                _mark(mark)
            else:
                shown(message, category, *where, **options)

        warnings.showwarning = show
        yield


def _marked(original: Callable[..., Any], mark: Marker) -> Callable[..., Any]:
    @wraps(original)
    def synchronize(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        _mark(mark)
        return result

    return synchronize


def _mark(mark: Marker) -> None:
    try:
        mark(MARK + line_of(sys._getframe(1)))()
    except Exception as error:
        warn_once(f"a synchronisation is not marked: {type(error).__name__}: {error}")


def line_of(frame: FrameType | None) -> str:
    """`file:line` of the innermost frame of the user's, or of the outermost frame if there is none.

    A file below the working directory is given relative to it.
    """
    place = "?"
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        place = f"{_shown(path)}:{frame.f_lineno}"
        if is_user_file(path):
            return place
        frame = frame.f_back
    return place


def _shown(path: Path) -> str:
    here = Path.cwd()
    return cell_of(str(path)) or str(path.relative_to(here) if path.is_relative_to(here) else path)
