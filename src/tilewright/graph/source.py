"""The line of the user's program that a node of a captured graph comes from."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.fx import Node

FRAME = re.compile(r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+).*(?:\n +(?P<code>(?!File ")\S.*))?', re.M)


@cache
def _torch_folder() -> str:
    import torch

    return str(Path(torch.__file__).parent) + os.sep


def source_line(node: Node) -> str | None:
    """The innermost frame outside torch: `model.py:12: y = x + 1`; None where none was recorded.

    >>> from torch.fx import Graph
    >>> node = Graph().placeholder("x")
    >>> node.meta["stack_trace"] = '  File "/home/ada/model.py", line 12, in forward\\n    y = x + 1\\n'
    >>> source_line(node)
    'model.py:12: y = x + 1'
    """
    trace = node.meta.get("stack_trace")
    return user_line(trace) if isinstance(trace, str) else None


def user_line(trace: str) -> str | None:
    """The innermost frame outside torch of a traceback as text."""
    # torch.fx runs the code it generates under names such as <eval_with_key>.3.
    frames = [
        frame for frame in FRAME.finditer(trace) if not frame["file"].startswith((_torch_folder(), "<eval_with_key>"))
    ]
    if not frames:
        return None
    frame = frames[-1]
    place = f"{Path(frame['file']).name}:{frame['line']}"
    return f"{place}: {frame['code'].strip()}" if frame["code"] else place
