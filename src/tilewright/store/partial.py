"""The temporary folder in which a process writes a run; removed when the process ends."""

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
    """A new folder beside the runs in `parent`, locked while the process that made it lives.

    Unlocked folders in `parent` were left by killed processes and are removed first. Raises OSError.
    """

    def __init__(self, parent: Path) -> None:
        with _locked(parent):
            for other in parent.glob(f"{PREFIX}*{SUFFIX}"):
                _remove_if_unlocked(other)
            self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, suffix=SUFFIX, dir=parent)
            self.path = Path(self._folder.name)
            self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._handle, fcntl.LOCK_EX)

    def cleanup(self) -> None:
        """Remove the folder and its content. A second call does nothing."""
        self._folder.cleanup()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _remove_if_unlocked(folder: Path) -> None:
    # The folder may belong to another user, or its owner may have removed it meanwhile.
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(handle)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Only one process at a time creates or removes folders, so no new folder is seen before it is locked."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
