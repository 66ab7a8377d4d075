"""The names of source files as people know them: a cell of a notebook is `In [3]`, not a file in /tmp."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import PurePath


def in_ipython() -> bool:
    """Whether this process runs the code of a notebook or of IPython."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def in_kernel() -> bool:
    """Whether this process runs the cells of a notebook, whose stderr is no terminal."""
    return in_ipython() and hasattr(sys.modules["IPython"].get_ipython(), "kernel")


def display(of: dict[str, str]) -> Callable[[dict[str, str]], None]:
    """Show `of`, text by MIME type, below the cell that runs; the value replaces it."""
    shown = import_module("IPython.display").display(of, raw=True, display_id=True)
    return lambda other: shown.update(other, raw=True)


def cell_of(file: str) -> str | None:
    """`In [3]` for the file that stands for a cell in the code of this process, by IPython's own numbers.

    None for any other file, and where IPython does not run. A cell that ran again has its last number.
    """
    if not in_ipython():
        return None
    named = sys.modules["IPython"].get_ipython().compile.format_code_name(file)
    return named[1].replace("In[", "In [") if named and named[0] == "Cell" else None


def file_name(file: str) -> str:
    """The name without folders, or the cell.

    >>> file_name("/home/ada/model.py")
    'model.py'
    """
    return cell_of(file) or PurePath(file).name
