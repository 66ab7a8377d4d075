"""The part of a compiled program's cache key that its graph and inputs do not give: versions, code, environment."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch

ENVIRONMENT = ("TILEWRIGHT_TARGET", "TRITON_INTERPRET", "CXX")


def keeps_programs() -> bool:
    """Whether compiled programs are kept on disk: not with `TILEWRIGHT_KEEP_PROGRAMS=0`, nor where PyTorch's caches are
    switched off (`TORCHINDUCTOR_FORCE_DISABLE_CACHES=1`)."""
    return os.environ.get("TILEWRIGHT_KEEP_PROGRAMS") != "0" and not torch.compiler.config.force_disable_caches


def versions() -> Sequence[str]:
    """Versions and code, and the variables of the environment that plans depend on."""
    return [*_fixed(), *(f"{name}={os.environ.get(name)}" for name in ENVIRONMENT)]


@functools.cache
def _fixed() -> Sequence[str]:
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    pytorch = f"{torch.__version__} {torch.version.git_version}"
    return [platform.python_version(), platform.machine(), pytorch, f"triton {triton}", _code()]


def _code() -> str:
    """A digest of tilewright's own files."""
    folder = Path(str(files("tilewright")))
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)} ".encode() + content)
    return digest.hexdigest()
