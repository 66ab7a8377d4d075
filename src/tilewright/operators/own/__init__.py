"""Rows of tilewright's own operators: a file for each folder of `kernels/`, which this package must not import.

A row holds the operator's schema; the folder's `define("name", …)` takes it from here, so that cost, traces and
`explain` know the operator where its kernels, and PyTorch, are not imported. Importing this package declares all.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
