"""The error for an access outside of a kernel's tensors, and what is said of it."""

from __future__ import annotations

from typing import Literal

Access = Literal["reads", "writes"]
STRAY: dict[Access, str] = {
    "reads": (
        "line {line} reads {count} elements outside of its tensors: a mask is missing or too wide, or the grid has "
        "too many programs"
    ),
    "writes": (
        "line {line} writes {count} elements outside of its tensors: a mask is missing or too wide, or the grid has "
        "too many programs"
    ),
}


class StrayAccessError(Exception):
    """A load or store of an element that no tensor of the launch has."""

    def __init__(self, line: int, does: Access, count: int) -> None:
        super().__init__(STRAY[does].format(line=line, count=f"{count:,}"))
        self.line, self.does, self.count = line, does, count
