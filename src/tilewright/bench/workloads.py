"""Workloads of the suites: operands drawn at given sizes in a dtype, and the least work of each direction."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright.records.measurement import Direction
from tilewright.records.suite import Work, Workload

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
"""Dtypes as tables and result files name them, by PyTorch's names."""


class Draw:
    """Draws operands of one dtype on a device."""

    def __init__(self, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
        self.dtype, self.device, self.generator = dtype, device, generator

    def __call__(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        """Normal numbers; the tensor gets a gradient."""
        if std == 1.0:
            made = torch.randn(shape, dtype=self.dtype, device=self.device, generator=self.generator)
        else:
            made = torch.empty(shape, dtype=self.dtype, device=self.device).normal_(std=std, generator=self.generator)
        return made.requires_grad_()

    def integers(self, below: int, count: int) -> torch.Tensor:
        """int64 numbers from 0 on."""
        return torch.randint(below, (count,), device=self.device, generator=self.generator)


def workloads(
    operands: Callable[..., tuple[Any, ...]],
    work: Callable[..., Mapping[Direction, Work]],
    name: Callable[..., str] = lambda *sizes: "x".join(map(str, sizes)),
) -> Callable[[tuple[int, ...], str], Workload]:
    """A suite's workload of any sizes and dtype.

    `operands(draw, *sizes)` gives the arguments, `work(itemsize, *sizes)` the work of each direction, and
    `name(*sizes)` what tables show before the dtype. The workload raises ValueError for another number of sizes.
    """
    taken = inspect.signature(work)

    def workload(sizes: tuple[int, ...], dtype: str) -> Workload:
        kind: torch.dtype = getattr(torch, dtype)
        try:
            taken.bind(kind.itemsize, *sizes)
        except TypeError as error:
            raise ValueError(f"sizes {sizes}: {error}") from error

        def make(device: torch.device, generator: torch.Generator) -> tuple[Any, ...]:
            return operands(Draw(kind, device, generator), *sizes)

        return Workload(f"{name(*sizes)} {SHORT[dtype]}", sizes, dtype, make, work(kind.itemsize, *sizes))

    return workload
