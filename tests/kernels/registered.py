"""Every operator that the rooms of `kernels/` register."""

from __future__ import annotations

import importlib
import pkgutil

from tilewright import kernels
from tilewright.kernels.registration import IMPLEMENTATIONS


def all_operators() -> list[str]:
    """By full name, `tilewright::softmax`, once every module there has been imported; tests may define others."""
    for module in pkgutil.walk_packages(kernels.__path__, "tilewright.kernels."):
        importlib.import_module(module.name)
    return [name for name, run in IMPLEMENTATIONS.items() if run.__module__.startswith("tilewright.kernels.")]
