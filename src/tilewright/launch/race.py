"""A race of alternatives for one piece of work on one device; its outcome is kept for all processes.

It depends on the work, and on sources, versions, compilers and the device.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from tilewright.launch import nvrtc
from tilewright.measure.timing.contest import SECONDS, contest
from tilewright.pytorch.state import in_real_tensors
from tilewright.records import cache, cxx, outcomes, sources
from tilewright.records.errors import CompilerError, warn_once
from tilewright.records.outcomes import Outcome

Alternatives = Mapping[str, Callable[[], object]]
"""Calls by name; the results of the first are trusted."""


@dataclass(frozen=True)
class Race:
    """What is raced, and how; `race_key` says what the outcome depends on besides."""

    work: tuple[str, ...]
    device: torch.device
    made_from: tuple[str, ...]
    alternatives: Callable[[], Alternatives]
    """Makes random operands, so that it is called only if there is no outcome."""
    seconds: float = SECONDS
    """Time of the race, beside the first calls."""
    operand_eps: float = 0.0
    """ε of the numbers that an alternative may round its operands to, where that is more than their dtype's: TF32."""

    @property
    def key(self) -> str:
        return race_key(self.work, self.device, self.made_from)

    def outcome(self, *, measure: bool = True) -> Outcome | None:
        """The kept outcome, else with `measure` that of a race now. None where there is neither: nothing is measured
        while a CUDA graph is captured, nor where memory is lacking."""
        found = outcomes.lookup(self.key)
        if found is not None or not measure or is_captured(self.device):
            return found
        try:
            found = run(self.alternatives, self.device, self.seconds, self.operand_eps)
        except torch.OutOfMemoryError:
            warn_once(f"no memory to race {' '.join(self.work)}")
            return None
        outcomes.keep(self.key, found)
        return found


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def run(
    alternatives: Callable[[], Alternatives],
    device: torch.device,
    seconds: float = SECONDS,
    operand_eps: float = 0.0,
) -> Outcome:
    """Race on `device` whatever modes PyTorch is in: in real tensors, without gradients and autocast."""
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with in_real_tensors(), on_device, torch.no_grad(), torch.autocast(device.type, enabled=False):
        return contest(alternatives(), device, seconds=seconds, operand_eps=operand_eps)


def random_operand(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, own: torch.Generator
) -> torch.Tensor:
    """A tensor from a generator of the race's own: a call that waits for it draws from the default one."""
    return torch.empty_strided(shape, strides, dtype=dtype, device=own.device).normal_(generator=own)


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
