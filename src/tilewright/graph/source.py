"""The source line of a captured node in the user's program."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from tilewright.records.notebook import file_name

if TYPE_CHECKING:
    from torch.fx import Node

FRAME = re.compile(r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+).*(?:\n +(?P<code>(?!File ")\S.*))?', re.M)


@cache
def library_prefixes() -> tuple[str, ...]:
    """How the names of files begin that are torch's, tilewright's or generated."""
    import torch

    folders = [Path(torch.__file__).parent, Path(__file__).parents[1]]
    # Generated code of torch.fx has file names such as <eval_with_key>.3.
    return *(f"{folder}{os.sep}" for folder in folders), "<eval_with_key>"


def source_line(node: Node) -> str | None:
    """The innermost frame outside torch and tilewright: `model.py:12: y = x + 1`.

    If there is none, as in a module that consists of PyTorch's layers, the layer, `layer 2: GELU`; else None.

    >>> from torch.fx import Graph
    >>> node = Graph().placeholder("x")
    >>> node.meta["stack_trace"] = '  File "/home/ada/model.py", line 12, in forward\\n    y = x + 1\\n'
    >>> source_line(node)
    'model.py:12: y = x + 1'
    """
    trace = node.meta.get("stack_trace")
    return (user_line(trace) if isinstance(trace, str) else None) or _layer(node)


def _layer(node: Node) -> str | None:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    # Dynamo's path to the module, `L['model'].encoder.2`, and its class.
    path, kind = [*stack.values()][-1]
    name = str(path).rpartition("]")[2].strip(".")
    return f"layer {name}: {getattr(kind, '__name__', kind)}" if name else None


def user_line(trace: str) -> str | None:
    """The innermost frame outside torch and tilewright in the text of a traceback."""
    frames = [frame for frame in FRAME.finditer(trace) if not frame["file"].startswith(library_prefixes())]
    if not frames:
        return None
    return place_text(frames[-1]["file"], frames[-1]["line"], frames[-1]["code"] or "")


def place_text(file: str, line: int | str, code: str) -> str:
    """A line of a program as messages name it: `model.py:12: y = x + 1`."""
    return f"{file_name(file)}:{line}" + (f": {code.strip()}" if code.strip() else "")


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame from `frame` outwards whose code is neither torch's nor tilewright's."""
    while frame is not None and frame.f_code.co_filename.startswith(library_prefixes()):
        frame = frame.f_back
    return frame
