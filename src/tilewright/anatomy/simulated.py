"""Simulates a CUDA device while kernels are captured: they compile for it and never run.

PyTorch's tensors are CPU tensors that claim to be on `cuda:0`, random factories give zeros (whose pages the system
maps only when accessed), and Triton's driver returns the target of a profile. Operators that need values, such as
`.item()`, get zeros.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.hardware.architectures import architecture, limits_of, stated_limits
from tilewright.hardware.profiles import DeviceProfile
from tilewright.kernels.registration import IMPLEMENTATIONS

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
_NUMBER = 7700
"""Triton caches compiled kernels by device number; this one differs from all real devices."""
_ANSWERS: dict[object, object] = {
    torch.Tensor.device.__get__: CUDA,
    torch.Tensor.is_cuda.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.get_device: 0,
}
_RANDOM: dict[object, Callable[..., torch.Tensor]] = {
    torch.randn: torch.zeros,
    torch.rand: torch.zeros,
    torch.randn_like: torch.zeros_like,
    torch.rand_like: torch.zeros_like,
}
_AS_IT_IS = (torch.Tensor.cuda, torch.Tensor.normal_, torch.Tensor.uniform_)


class _FakeCudaMode(TorchFunctionMode):
    """Every tensor claims to be on the GPU, and every request for the GPU is executed on the CPU."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ANSWERS:
            return _ANSWERS[func]
        if func in _AS_IT_IS:
            return args[0]
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = {name: _on_host(value) for name, value in (kwargs or {}).items()}
        if func in _RANDOM:
            kwargs.pop("generator", None)
            func = _RANDOM[func]
        return func(*map(_on_host, args), **kwargs)


class _OperatorMode(TorchDispatchMode):
    """Calls the implementation of tilewright's operators with the fake device still active."""

    def __init__(self, fake_cuda: _FakeCudaMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake_cuda = fake_cuda

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace != "tilewright":
            return func(*args, **(kwargs or {}))
        # PyTorch omits arguments that have their default value.
        omitted = [argument for argument in func._schema.arguments[len(args) :] if not argument.kwarg_only]
        with self, self.fake_cuda:
            return IMPLEMENTATIONS[func.name()](*args, *(a.default_value for a in omitted), **(kwargs or {}))


class _Generator:
    """The fake device's random generator."""

    def initial_seed(self) -> int:
        """PyTorch's default seed; a small seed would be passed as a 32-bit argument."""
        return 67280421310721

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Ignored."""


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] == "cuda"):
        return CPU
    return value


class CompileDriver:
    """The part of Triton's driver that compilation uses: the target and the current device."""

    def __init__(self, capability: str) -> None:
        from triton.backends.compiler import GPUTarget

        row = architecture(capability)
        backend, arch = ("cuda", row.number) if row.cuda else ("hip", capability)
        self.target = GPUTarget(backend, arch, row.warp_size)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return _NUMBER + int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return CUDA


@contextlib.contextmanager
def simulated(profile: DeviceProfile, capability: str) -> Iterator[None]:
    """Inside, `cuda:0` is the device of `profile`. Use it with `capturing(run=False)`: no kernel can run."""
    from triton.runtime.driver import driver

    before = driver._active
    driver.set_active(CompileDriver(capability))
    limits_of.cache_clear()
    fake_cuda = _FakeCudaMode()
    try:
        with contextlib.ExitStack() as stack:
            for name, value in _module(profile, capability).items():
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
            stack.enter_context(_OperatorMode(fake_cuda))
            stack.enter_context(fake_cuda)
            yield
    finally:
        driver._active = before
        limits_of.cache_clear()


def _module(profile: DeviceProfile, capability: str) -> dict[str, Any]:
    """Replacements of functions of `torch.cuda`."""
    major, minor = map(int, capability.split("."))
    limits = stated_limits(capability, profile.sms, profile.l2_bytes)
    properties = SimpleNamespace(
        name=profile.name,
        major=major,
        minor=minor,
        multi_processor_count=limits.multiprocessors,
        L2_cache_size=limits.l2_bytes,
        max_threads_per_multi_processor=limits.max_threads,
        max_threads_per_block=limits.max_threads_per_block,
        regs_per_multiprocessor=limits.registers,
        shared_memory_per_multiprocessor=limits.shared_bytes,
        shared_memory_per_block_optin=limits.shared_bytes_per_block,
        total_memory=2**37,
        warp_size=limits.warp_size,
    )
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (major, minor),
        "get_device_name": lambda device=None: profile.name,
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0),
        "synchronize": lambda device=None: None,
        "is_current_stream_capturing": lambda: False,
        "default_generators": (_Generator(),),
        "device": lambda device=None: contextlib.nullcontext(),
    }
