"""Inputs for a case, reproducible from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tilewright.records.case import Case, InputSpec

INTEGER_BOUND = 8
"""Integers are drawn from [0, 8): small enough to index any embedding, exact in every float dtype."""


def make_inputs(case: Case, *, seed: int, device: str, requires_grad: bool) -> list[torch.Tensor]:
    """One contiguous tensor per input of `case`, in its shape and dtype, on `device`.

    Floats are standard normal, integers uniform in [0, 8), bools fair; `requires_grad` applies to the floats.
    A separate generator on `device` draws the values, so the default generator's state does not change; a CPU
    and a GPU draw different values from one seed.
    """
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    tensors = [draw(spec, generator) for spec in case.inputs]
    return [tensor.requires_grad_(requires_grad and tensor.is_floating_point()) for tensor in tensors]


def draw(spec: InputSpec, generator: torch.Generator) -> torch.Tensor:
    """One tensor of `spec` on the generator's device: floats standard normal, integers in [0, 8), fair bools."""
    import torch

    dtype: torch.dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.randn(spec.shape, dtype=dtype, device=generator.device, generator=generator)
    bound = 2 if dtype is torch.bool else INTEGER_BOUND
    return torch.randint(bound, spec.shape, dtype=dtype, device=generator.device, generator=generator)


def on_device(model: Callable[..., Any], device: str) -> Callable[..., Any]:
    """`model`, moved to `device` if it is a module."""
    import torch

    return model.to(device) if isinstance(model, torch.nn.Module) else model
