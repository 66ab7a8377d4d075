"""Every operator of tilewright's own that the packages of `kernels/` and `passes/` register."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from tilewright import kernels, passes
from tilewright.kernels.registration import IMPLEMENTATIONS
from tilewright.launch.eager import EagerOperator
from tilewright.operators.table import rows


def all_operators() -> list[str]:
    """By full name, `tilewright::softmax`, once every module there has been imported; tests may define others."""
    for package in (kernels, passes):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    ours = (kernels.__name__, passes.__name__)
    written = [name for name, run in IMPLEMENTATIONS.items() if _written_in(run).startswith(ours)]
    # The draws of `kernels/dropout_add/philox.py` are inserted by passes.
    return [name for name in written if rows()[name.replace("::", ".") + ".default"].own]


def _written_in(run: Callable[..., Any]) -> str:
    """The module of an implementation, of one with recipes too."""
    owner = getattr(run, "__self__", None)
    return (owner.implementation if isinstance(owner, EagerOperator) else run).__module__
