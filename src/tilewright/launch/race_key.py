"""What the outcome of a race depends on besides the work itself: sources, versions, compilers and the device."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from collections.abc import Sequence

import torch

from tilewright.launch import cxx, nvrtc
from tilewright.records import cache, sources
from tilewright.records.errors import CompilerError


def race_key(work: Sequence[str], device: torch.device, made_from: Sequence[str]) -> str:
    """The key of a race on `device` of candidates that the sources `made_from` (`records/sources.py`) make.

    `work` says what is raced. When one of these sources changes, the outcome is no longer found.
    """
    return cache.key_of("race", *work, sources.digest(*made_from), *versions(), *_compiler(device), device_kind(device))


@functools.cache
def versions() -> Sequence[str]:
    """Python, machine, PyTorch and Triton."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    pytorch = f"{torch.__version__} {torch.version.git_version}"
    return platform.python_version(), platform.machine(), pytorch, f"triton {triton}"


def device_kind(device: torch.device) -> str:
    """What devices that run alike have in common; a GPU's number does not count, a CPU's threads do."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"


def _compiler(device: torch.device) -> Sequence[str]:
    """The compiler of hand-written sources for the device; none where it is missing: then it made no candidate."""
    try:
        return cxx.identity() if device.type == "cpu" else (nvrtc.version(),)
    except CompilerError:
        return ()
