"""The part of a compiled program's cache key that its graph and inputs do not give: versions, code, environment."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from tilewright.launch import race
from tilewright.records import sources

ENVIRONMENT = ("TILEWRIGHT_TARGET", "TILEWRIGHT_SKIP", "TRITON_INTERPRET", "CXX")


def keeps_programs() -> bool:
    """Whether compiled programs are kept on disk: not with `TILEWRIGHT_KEEP_PROGRAMS=0`, nor where PyTorch's caches are
    switched off (`TORCHINDUCTOR_FORCE_DISABLE_CACHES=1`)."""
    return os.environ.get("TILEWRIGHT_KEEP_PROGRAMS") != "0" and not torch.compiler.config.force_disable_caches


def versions() -> Sequence[str]:
    """Versions and code, and the variables of the environment that plans depend on."""
    return [*race.versions(), sources.digest("."), *(f"{name}={os.environ.get(name)}" for name in ENVIRONMENT)]
