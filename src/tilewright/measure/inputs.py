"""Arguments for a case, reproducible from a seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilewright.records.case import InputSpec, leaves, with_leaves
from tilewright.records.errors import UsageError, warn_once

if TYPE_CHECKING:
    import torch

    from tilewright.records.case import Case

INTEGERS = (0, 2)
"""Integers without a range are 0 or 1: they index any table of two rows, and are masks and labels."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call; `tensors` are all those among them, in order."""

    positional: tuple[Any, ...]
    keywords: dict[str, Any]
    tensors: list[torch.Tensor]

    @property
    def are_flat(self) -> bool:
        """Whether the arguments are the tensors, without names."""
        return len(self.positional) == len(self.tensors) and not self.keywords

    def call(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor] | None = None) -> Any:
        """`function` called with these arguments, with `tensors` in place of their own if given."""
        if tensors is None:
            return function(*self.positional, **self.keywords)
        positional, keywords = with_leaves((self.positional, self.keywords), iter(tensors))
        return function(*positional, **keywords)


def make_arguments(case: Case, *, seed: int, device: str, requires_grad: bool) -> Arguments:
    """The arguments of `case` on `device`: copies of its example tensors; a tensor is drawn for each `InputSpec`, and
    for examples without values.

    Floats are standard normal, integers from the range of their spec (0 and 1 without one), bools fair;
    `requires_grad` applies to floats and complex numbers. A separate generator on `device` draws the values, so the
    default generator's state does not change; a CPU and a GPU draw different values from one seed.
    """
    import torch

    from tilewright.pytorch.state import has_values

    generator = torch.Generator(device).manual_seed(seed)

    def made(leaf: Any) -> torch.Tensor:
        is_drawn = isinstance(leaf, InputSpec) or not has_values(leaf)
        tensor = draw(InputSpec.of(leaf), generator) if is_drawn else _copy(leaf, device)
        return tensor.requires_grad_(requires_grad and (tensor.is_floating_point() or tensor.is_complex()))

    given = tuple(case.inputs), dict(case.keywords)
    tensors = [made(leaf) for leaf in leaves(given)]
    positional, keywords = with_leaves(given, iter(tensors))
    return Arguments(positional, keywords, tensors)


def make_inputs(case: Case, *, seed: int, device: str, requires_grad: bool) -> list[torch.Tensor]:
    """The tensors of `make_arguments`."""
    return make_arguments(case, seed=seed, device=device, requires_grad=requires_grad).tensors


def draw(spec: InputSpec, generator: torch.Generator) -> torch.Tensor:
    """One tensor of `spec` on the generator's device. Raises UsageError for a size or dtype that PyTorch lacks."""
    import torch

    dtype: torch.dtype = getattr(torch, spec.dtype)
    try:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(spec.shape, dtype=dtype, device=generator.device, generator=generator)
        low, high = spec.bounds or INTEGERS
        return torch.randint(low, high, spec.shape, dtype=dtype, device=generator.device, generator=generator)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"no input {spec.dtype} of shape {list(spec.shape)} can be drawn: {reason}") from error


def _copy(example: torch.Tensor, device: str) -> torch.Tensor:
    """A leaf with the values and strides of an example tensor, in memory of its own."""
    import torch

    from tilewright.measure.truth.reference import whole_storage

    if example.layout is not torch.strided:
        return example.detach().to(device, copy=True)
    storage = whole_storage(example).to(device, copy=True)
    return storage.as_strided(example.shape, example.stride(), example.storage_offset())


def on_device(model: Callable[..., Any], device: str) -> Callable[..., Any]:
    """`model`, moved to `device` if it is a module."""
    import torch

    return model.to(device) if isinstance(model, torch.nn.Module) else model


def note_training_mode(case: Case, model: Callable[..., Any]) -> None:
    """A line on standard error if a module is called for inference, but its dropout or batch norms act as in training.

    PyTorch makes modules so: a model for inference is `model.eval()`.
    """
    from torch import nn

    if case.training or not isinstance(model, nn.Module):
        return
    acting = [module for module in model.modules() if module.training]
    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    does = []
    if any(isinstance(module, dropouts) and module.p for module in acting):
        does.append("dropout draws masks")
    if any(isinstance(module, norms) for module in acting):
        does.append("batch norms use the batch's own mean and variance")
    if does:
        warn_once(f"{case.name} is in training mode: {' and '.join(does)}; for inference call its eval()")
