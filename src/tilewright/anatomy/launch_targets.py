"""The targets of `tilewright kernel` as functions that launch the kernels to analyse."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tilewright.case_names import load_object
from tilewright.records.case import Case
from tilewright.records.errors import TargetError, UsageError
from tilewright.records.launch_record import Grid
from tilewright.records.suite import Suite, Variant, Workload


@dataclass(frozen=True)
class LaunchTarget:
    """A target to run. `stages` runs it on a device in stages, and yields after each."""

    name: str
    stages: Callable[[torch.device, torch.Generator], Iterator[bool]]
    """Yields True after a stage whose launches belong to the target, else False (preparation)."""


def of_operator(suite: Suite, workload: Workload, variant: Variant, direction: str) -> LaunchTarget:
    """A variant of an operator for a workload, in one direction."""

    def stages(device: torch.device, generator: torch.Generator) -> Iterator[bool]:
        arguments = workload.make(device, generator)
        yield False
        results = variant.function(*arguments)
        yield direction != "bwd"
        if direction == "fwd":
            return
        outputs = [t for t in (results if isinstance(results, tuple) else (results,)) if t.requires_grad]
        wanted = [t for t in arguments if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.autograd.grad(outputs, wanted, [torch.ones_like(t) for t in outputs])
        yield True

    return LaunchTarget(f"{suite.name} {workload.name} {direction} {variant.name}", stages)


def of_product(sizes: Sequence[int], dtype: str) -> LaunchTarget:
    """The library's product of M×K and K×N, `sizes` being M, N, K."""
    m, n, k = sizes

    def stages(device: torch.device, generator: torch.Generator) -> Iterator[bool]:
        kind: torch.dtype = getattr(torch, dtype)
        left, right = (torch.randn(a, b, device=device, generator=generator).to(kind) for a, b in ((m, k), (k, n)))
        yield False
        torch.mm(left, right)
        yield True

    return LaunchTarget(f"matmul {m}x{n}x{k} {dtype} cublas", stages)


def of_case(case: Case, impl: str) -> LaunchTarget:
    """A case run by one implementation (`eager`, `inductor`, `tilewright`), with backward if it trains."""

    def stages(device: torch.device, generator: torch.Generator) -> Iterator[bool]:
        from tilewright.verbs import Subject as Runs

        runs = Runs(case, str(device))
        # Compiles, and races configurations on the device.
        runs.call(impl)
        yield False
        runs.call(impl)
        yield True

    return LaunchTarget(f"{case.name} {impl}", stages)


def of_kernel(target: str, launch: str) -> LaunchTarget:
    """A user's Triton kernel `file.py:kernel`, launched by the file's function `launch`. Raises TargetError."""
    place, _, name = target.rpartition(":")
    try:
        function = load_object(f"{place}:{launch}")
    except TargetError as error:
        raise TargetError(
            f"{error}; {name} is launched by a function of its file (--launch NAME, default launch)"
        ) from error
    if not callable(function):
        raise TargetError(f"{place}:{launch} is not a function that launches {name}")
    call = function

    def stages(device: torch.device, generator: torch.Generator) -> Iterator[bool]:
        call()
        yield True

    return LaunchTarget(name, stages)


def grid_of(text: str) -> Grid:
    """`63` or `63,1,1`; UsageError for anything else."""
    if not re.fullmatch(r"\d+(\s*[,x]\s*\d+){0,2}", text):
        raise UsageError(f"grid {text!r} is not of the form 63 or 63,1,1")
    x, y, z = (*map(int, re.findall(r"\d+", text)), 1, 1)[:3]
    return x, y, z
