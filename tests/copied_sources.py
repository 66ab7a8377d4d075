"""A copy of tilewright's sources in which a test changes lines: digests are of the copy."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tilewright.records import sources


@contextmanager
def copied_sources(folder: Path, monkeypatch: pytest.MonkeyPatch, *packages: str) -> Iterator[Path]:
    """The sources of some packages, copied to `folder`."""
    for name in packages:
        shutil.copytree(sources.ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    with monkeypatch.context() as patched:
        patched.setattr(sources, "ROOT", folder)
        sources.digest.cache_clear()
        yield folder
    sources.digest.cache_clear()


def change_a_line(path: Path) -> None:
    path.write_text(path.read_text() + "\n// another line\n")
    sources.digest.cache_clear()
