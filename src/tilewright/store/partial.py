"""The folder in which a run grows before it gets its name: its maker's own, and gone with it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX, SUFFIX = ".run-", ".partial"


class PartialFolder:
    """A new folder beside the runs in `parent`, locked as long as the process that made it lives.

    What killed processes left in `parent` is removed first: folders that nobody holds. Raises OSError.
    """

    def __init__(self, parent: Path) -> None:
        with _locked(parent):
            for left in parent.glob(f"{PREFIX}*{SUFFIX}"):
                _remove_if_left(left)
            self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, suffix=SUFFIX, dir=parent)
            self.path = Path(self._folder.name)
            self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._handle, fcntl.LOCK_EX)

    def cleanup(self) -> None:
        """Remove the folder and what is in it; once is enough."""
        self._folder.cleanup()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _remove_if_left(folder: Path) -> None:
    # It may be another user's, or be finished and gone by now.
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(handle)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time makes or sweeps: a new folder is never without its holder."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
