"""The peers of a suite that are made alike for every operator: Inductor, and libraries that may be missing."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from tilewright.records.suite import Variant, Workload


def inductor(function: Callable[..., Any], **options: Any) -> Variant:
    """`function` under `torch.compile` with static shapes, compiled at its first call."""
    import torch

    return Variant("inductor", "inductor", torch.compile(function, dynamic=False), **options)


def library(name: str, module: str, function: Callable[..., Any], **options: Any) -> Variant:
    """A peer from the package of `module` (`liger_kernel`), refused where that is not installed.

    `function` imports what it needs when it is called.
    """

    def refuses(_: Workload) -> str | None:
        return None if importlib.util.find_spec(module.split(".")[0]) else f"{module} is not installed"

    return Variant(name, "library", function, refuses=refuses, **options)
