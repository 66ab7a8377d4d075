"""Which inputs, parameters and buffers a call wrote, and the module as it was before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    State = dict[str, torch.Tensor]

AFTER = " after the call"


def is_after(name: str) -> bool:
    """Whether a row's name is that of a tensor after the call."""
    return name.endswith(AFTER)


def after_the_call(inputs: Sequence[Any], state: State) -> State:
    """The strided tensors among the inputs, parameters and buffers, by the names of their rows."""
    import torch

    tensors = {f"input {i}": t for i, t in enumerate(inputs) if isinstance(t, torch.Tensor)} | state
    return {f"{n}{AFTER}": t for n, t in tensors.items() if t.layout is torch.strided and not t.is_quantized}


def told_apart(before: State, after: State) -> tuple[State, State]:
    """The tensors after a call, by whether it changed them, in place or by assigning a module another buffer."""
    parts: tuple[State, State] = {}, {}
    for name, tensor in after.items():
        parts[name in before and are_equal(before[name], tensor)][name] = tensor
    return parts


def are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of one shape and dtype, with the same values; NaN is equal to itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def module_state(model: Callable[..., Any]) -> State:
    """A module's parameters and buffers by name; a function has none."""
    import torch

    if not isinstance(model, torch.nn.Module):
        return {}
    return dict(model.named_parameters()) | dict(model.named_buffers())


@contextmanager
def restored(model: Callable[..., Any]) -> Iterator[State]:
    """Copies of a module's state; afterwards it has its tensors again, and these have their values."""
    import torch

    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    kept: list[tuple[dict[str, Any], dict[str, Any]]]
    kept = [(held, dict(held)) for m in modules for held in (m._parameters, m._buffers)]
    state = module_state(model)
    values = {name: tensor.detach().clone() for name, tensor in state.items()}
    trainable = {name for name, tensor in state.items() if tensor.requires_grad}
    try:
        yield values
    finally:
        with torch.no_grad():
            for held, before in kept:
                held.update(before)
            for name, tensor in state.items():
                if tensor.grad_fn is not None and not tensor._is_view():
                    tensor.detach_().requires_grad_(name in trainable)
                if not are_equal(tensor, values[name]):
                    tensor.copy_(values[name])
