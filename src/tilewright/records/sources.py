"""Digests of tilewright's own sources: a race, a row of a benchmark or a compiled program is valid for these alone."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

ROOT = Path(str(files("tilewright")))
GENERATED = ("emit/triton.py", "emit/triton_math.py", "loops", "schedule")
"""What generated kernels for a GPU are made from."""
PROGRAMS = (
    "backend.py", "compile", "choose", "runtime", "passes", "kernels", "launch", "emit", "cost", "schedule", "loops",
    "capture", "graph", "operators",
)  # fmt: skip
"""What compiled programs are made from."""
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_IMPORT = re.compile(r"^\s*from tilewright\.([\w.]+) import (\([^)]*\)|[^\n]*)", re.MULTILINE)


@functools.cache
def digest(*parts: str) -> str:
    """A digest of files and folders of the package (`kernels/softmax`, `emit/triton.py`; "." is all of it).

    Of a source in one of the package's folders, the files that it imports or includes from that folder count too: those
    of `kernels/softmax` are also `kernels/row.py` and `kernels/row.cuh`, but no file of `launch`.

    >>> digest("kernels/softmax") == digest("kernels/softmax", "kernels/row.cuh") != digest("kernels/norm")
    True
    """
    found = hashlib.sha256()
    for path in sorted(_reached(parts)):
        content = path.read_bytes()
        found.update(f"{path.relative_to(ROOT)} {len(content)} ".encode() + content)
    return found.hexdigest()[:32]


def _reached(parts: tuple[str, ...]) -> set[Path]:
    waiting = [path for part in parts for path in _files(ROOT / part)]
    reached: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in reached:
            reached.add(path)
            waiting += _needed(path)
    return reached


def _files(place: Path) -> list[Path]:
    found = [path for path in place.rglob("*") if path.is_file()] if place.is_dir() else [place]
    return [path for path in found if path.suffix != ".pyc"]


def _needed(path: Path) -> Iterator[Path]:
    """The files that a source imports or includes from its own folder of the package."""
    package = path.relative_to(ROOT).parts[0]
    text = path.read_text("utf-8", "replace")
    if path.suffix == ".py":
        for module, names in _IMPORT.findall(text):
            if module.split(".")[0] == package:
                for name in (module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))):
                    place = ROOT.joinpath(*name.split("."))
                    yield from (p for p in (place.with_suffix(".py"), place / "__init__.py") if p.exists())
    for name in INCLUDE.findall(text):
        yield from (p for p in (path.parent / name, ROOT / package / name) if p.exists())
