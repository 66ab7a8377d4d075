"""The device that a program is planned for, as one explicit argument."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from tilewright.hardware.architectures import known
from tilewright.hardware.profiles import DeviceProfile, kept_profile, profile_for

if TYPE_CHECKING:
    import torch

Language = Literal["c++", "triton"]
FOR_GPUS = "its kernels run on GPUs only, and this plan is for a CPU"
"""Why what has no kernels for CPUs is not used in a plan for one."""


@dataclass(frozen=True)
class Target:
    """A device with its ceilings and limits, and whether the program's tensors are on it."""

    profile: DeviceProfile
    is_present: bool = True
    """False: the program is captured on a CPU and only planned for this device."""
    measures: bool = False
    """Whether choices that prediction cannot settle are raced now; if not, outcomes kept earlier are used."""

    @property
    def is_gpu(self) -> bool:
        return self.profile.device == "cuda"

    @property
    def language(self) -> Language:
        """The language of its generated kernels; `TILEWRIGHT_TARGET=triton` forces Triton, for its interpreter."""
        return _language(self.is_gpu)

    @property
    def has_wgmma(self) -> bool:
        """Whether it is a GPU with the matrix instructions of a warpgroup (Hopper)."""
        found = known(self.profile.capability)
        return found is not None and found.wgmma

    @property
    def has_clusters(self) -> bool:
        """Whether it is a GPU with thread-block clusters."""
        found = known(self.profile.capability)
        return found is not None and found.max_cluster > 1

    @property
    def runs_cuda(self) -> bool:
        """Whether it is a GPU that runs CUDA C++, cuBLAS and cuDNN."""
        found = known(self.profile.capability)
        return self.is_gpu and (found is None or found.cuda)

    @property
    def is_planned_gpu(self) -> bool:
        """Whether the program is planned for a GPU that its tensors are not on."""
        return self.is_gpu and not self.is_present

    @property
    def tensor_device(self) -> str:
        """Where the program's tensors are: `cpu` or `cuda`."""
        return self.profile.device if self.is_present else "cpu"

    def runs_on_gpu(self, device: torch.device) -> bool:
        """Whether tensors on `device` are on a GPU, or are planned as if they were."""
        return device.type == "cuda" or self.is_planned_gpu

    def language_of(self, device: torch.device) -> Language:
        """The language of generated kernels whose results are on `device`."""
        return _language(self.runs_on_gpu(device))


def _language(on_gpu: bool) -> Language:
    return "triton" if on_gpu or os.environ.get("TILEWRIGHT_TARGET") == "triton" else "c++"


def target_named(name: str) -> Target:
    """A device of `hardware/profiles.py` by name, which need not be here; UsageError lists the known ones.

    >>> target_named("h200").is_planned_gpu
    True
    """
    return absent(profile_for(name))


def absent(profile: DeviceProfile) -> Target:
    """The target of a program that is captured on a CPU, whatever device it is planned for."""
    return Target(profile, is_present=profile.device == "cpu")


def target_of(device: torch.device) -> Target:
    """The target of tensors on `device`: by ceilings that were measured here, else by the nearest datasheet."""
    return Target(_profile_of(device.type, device.index))


@cache
def _profile_of(kind: str, index: int | None) -> DeviceProfile:
    return kept_profile(kind if index is None else f"{kind}:{index}")
