"""Models and arguments without memory: fake tensors, which only know shape, strides, dtype and device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tilewright.records.case import CopyOf


class Fakes:
    """Makes fake tensors on one device that can be traced together; one for each tensor."""

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.modules: dict[int, torch.nn.Module] = {}

    def making(self) -> AbstractContextManager[Any]:
        """Tensors that are made inside are fake."""
        return self.mode

    def tensor(self, value: Any) -> Any:
        """A fake tensor like `value`, a parameter if it is one; any other value itself."""
        if not isinstance(value, torch.Tensor) or (isinstance(value, FakeTensor) and value.fake_mode is self.mode):
            return value
        if id(value) not in self.known:
            self.known[id(value)] = value, self._like(value)
        return self.known[id(value)][1]

    def _like(self, value: torch.Tensor) -> torch.Tensor:
        if value.device == self.device and not isinstance(value, FakeTensor):
            return self.mode.from_tensor(value)
        with self.mode:
            # Tensors of a model on the meta device, or of another fake mode, stand for tensors on the device.
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.device)
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(made, value.requires_grad)
        return made.requires_grad_(value.requires_grad)

    def tensors(self, values: Iterable[Any]) -> list[Any]:
        return [self.tensor(value) for value in values]

    def model(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A module with fake parameters and buffers in place of the module's own, which stays as it is; any other
        function itself."""
        return self._module(function) if isinstance(function, torch.nn.Module) else function

    def _module(self, module: torch.nn.Module) -> torch.nn.Module:
        if id(module) not in self.modules:
            copied = object.__new__(type(module))
            self.modules[id(module)] = copied
            vars(copied).update(vars(module))
            for name, of in (("_parameters", self.tensor), ("_buffers", self.tensor), ("_modules", self.model)):
                parts = {key: of(part) for key, part in vars(module)[name].items()}
                vars(copied)[name] = parts
        return self.modules[id(module)]


def built_without_memory(build: Callable[[], Callable[..., Any]]) -> Callable[[], Callable[..., Any]]:
    """`build`, whose module is built once, of fake tensors.

    A module whose `__init__` reads values of tensors is built of real ones. One that exists is left as it is: `Fakes`
    copies it.
    """
    if isinstance(build, CopyOf):
        return lambda: build.module
    made: list[Callable[..., Any]] = []

    def once() -> Callable[..., Any]:
        if not made:
            # Whatever fails on fake tensors is built again, and raises again if they were not the reason.
            with suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
                made.append(build())
        if not made:
            made.append(build())
        return made[0]

    return once
