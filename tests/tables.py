"""Cases in text files: sections of rows, whose fields stand between ` | ` and may be Python.

    [section]
    name | inputs | program
    cubes | fp32[3,5] | x: x**3

The first line of a section names its fields; a row may leave out its last ones, and go on in indented lines.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

NAMES: dict[str, Any] = {"torch": torch, "F": F, "aten": torch.ops.aten, "own": torch.ops.tilewright, "inf": math.inf}
"""What Python in a field may use besides what its test gives it."""


def rows(path: Path, section: str) -> list[dict[str, str]]:
    """The rows of a section, each by the names of its fields; what a row leaves out is empty."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.M)
    sections = re.split(r"^\[(.+)\]\n", text, flags=re.M)
    header, *lines = re.sub(r"\n +", " ", sections[sections.index(section) + 1]).strip().splitlines()
    fields = header.split(" | ")
    split = [line.split(" | ") for line in lines if line]
    assert all(len(row) <= len(fields) for row in split), f"{path.name} [{section}] has a row of too many fields"
    return [dict(zip(fields, row + [""] * (len(fields) - len(row)), strict=True)) for row in split]


def value(text: str, names: Mapping[str, Any] | None = None) -> Any:
    """What a field says: `x, y: x + y` is a function, anything else an expression."""
    is_function = re.match(r"(\*?\w+(, )?)*: ", text)
    return eval(f"lambda {text}" if is_function else text, {**NAMES, **(names or {})})
