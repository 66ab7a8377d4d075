"""Normalised names of stack frames: the same code has the same name in every step, process and machine."""

from __future__ import annotations

import re
from typing import NamedTuple

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_STEP = re.compile(r"^(ProfilerStep|[Ss]tep|[Ii]teration)[ #_]*\d+$")
_PACKAGES = re.compile(r"^.*/(?:site-packages|dist-packages|lib/python3(?:\.\d+)?)/")
_PLACE = re.compile(r"^(?P<file>.+?)\((?P<line>\d+)\): (?P<function>.*)$", re.DOTALL)


class Place(NamedTuple):
    """The location of a Python frame; `line` is that of the function's definition, as the profiler writes it."""

    file: str
    line: int
    function: str


def fold_name(name: str) -> str:
    """`name` without parts that vary: addresses, step numbers, the folder of installed packages.

    >>> fold_name("<built-in method linear of type object at 0x7f105c6cea40>")
    '<built-in method linear of type object>'
    >>> fold_name("ProfilerStep#17"), fold_name("/opt/venv/lib/python3.12/site-packages/torch/a.py(3): f")
    ('ProfilerStep', 'torch/a.py(3): f')
    """
    step = _STEP.match(name)
    return step[1] if step else _PACKAGES.sub("", _ADDRESS.sub("", name))


def place_of(name: str) -> Place | None:
    """The file, line and function of a Python frame's name; None for any other name.

    >>> place_of("train.py(12): step")
    Place(file='train.py', line=12, function='step')
    """
    found = _PLACE.match(name)
    return Place(found["file"], int(found["line"]), found["function"]) if found else None
