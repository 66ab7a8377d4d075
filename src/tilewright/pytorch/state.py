"""Queries PyTorch's current state: active modes, transforms, tracers and profilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


@contextmanager
def in_real_tensors() -> Iterator[None]:
    """Compute with real tensors inside, also during a capture with fake tensors."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


@contextmanager
def without_onednn() -> Iterator[None]:
    """Inside, PyTorch calls oneDNN nowhere; traced programs have no call of it, such as one for a whole LSTM."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def watched() -> bool:
    """Whether a dispatch mode, a functorch transform or a tracer observes operator calls (autograd not counted)."""
    watching = torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None
    return bool(watching) or torch._C._functorch.peek_interpreter_stack() is not None or has_forward_level()


def compiled_autograd_is_on() -> bool:
    """Whether backward passes are traced: what autograd leaves undefined is no tensor there."""
    from torch._dynamo import compiled_autograd

    return bool(torch._dynamo.config.compiled_autograd or compiled_autograd.compiled_autograd_enabled)


def autocasts() -> bool:
    """Whether `torch.autocast` is active on any device."""
    return bool(torch._C._is_any_autocast_enabled())


def saved_tensors_hooked() -> bool:
    """Whether hooks of saved tensors are active: AOTAutograd may trace them into its graphs."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def computes_nothing() -> bool:
    """Whether operators called now only say what they would give: under `FakeTensorMode` or a tracer."""
    return any(torch._C._get_dispatch_mode(key) is not None for key in _INFRASTRUCTURE)


_MODES = torch._C._TorchDispatchModeKey
_INFRASTRUCTURE = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)


def has_forward_level() -> bool:
    """Whether forward-mode differentiation is active: `torch.autograd.forward_ad.dual_level`, `torch.func.jvp`."""
    return torch.autograd.forward_ad._current_level >= 0


def carries_tangents(values: Sequence[Any]) -> bool:
    """Whether forward-mode differentiation passes through one of these values."""
    if not has_forward_level():
        return False
    unpack: Callable[..., Any] = torch.autograd.forward_ad.unpack_dual
    return any(isinstance(x, torch.Tensor) and unpack(x).tangent is not None for x in values)


def lies_in_memory(x: torch.Tensor) -> bool:
    """Whether x has an address: it is neither a fake tensor nor a functorch wrapper."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(x, FakeTensor) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def unwrapped(x: torch.Tensor) -> torch.Tensor:
    """What functorch's transforms, as `vmap`, wrap in `x`; it has the storage."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def has_values(x: torch.Tensor) -> bool:
    """Whether the elements of a tensor are in memory: it is neither fake nor on the meta device."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not (x.is_meta or isinstance(x, FakeTensor))


def has_storage(x: torch.Tensor) -> bool:
    """Whether x lies over one storage: sparse tensors do not."""
    return torch._C._has_storage(x)


def share_elements(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors whose ranges of addresses meet share an element, for all that is known."""
    from torch._C._dynamo.guards import compute_overlapping_tensors

    same = x.untyped_storage()._cdata == y.untyped_storage()._cdata and x.dtype == y.dtype
    return not same or bool(compute_overlapping_tensors([x, y], symbolic=False))


def shown_as(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """x, from now on with the conjugate and negative bits of another tensor."""
    torch._C._set_conj(x, other.is_conj())
    torch._C._set_neg(x, other.is_neg())
    return x


def without_subclass(x: torch.Tensor) -> torch.Tensor:
    """x as a tensor of PyTorch's own class over the same memory; x itself if its class intercepts operators."""
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return x
    with in_real_tensors(), torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor)


def functions_watched() -> bool:
    """Whether a `TorchFunctionMode` is active."""
    return bool(torch._C._len_torch_function_stack())


def profiled() -> bool:
    """Whether one of PyTorch's profilers records operators in this thread."""
    return bool(torch._C._autograd._profiler_enabled())


def record_operators(enabled: bool) -> None:
    """Let PyTorch's profiler record operators of this thread, or not."""
    torch._C._autograd._enable_record_function(enabled)


def without_elements() -> AbstractContextManager[object]:
    """Inside, tensors that are made have no elements, and operators only say what they would give."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def below_autograd() -> bool:
    """Whether this code runs inside an operator, below its autograd kernel."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)


def compilations() -> tuple[int, int]:
    """How often Dynamo has compiled the current function, this time included, and its recompile limit."""
    from torch._dynamo import config
    from torch._guards import CompileContext

    context = CompileContext.current_compile_id()
    return (context.frame_compile_id or 0) + 1 if context else 1, config.recompile_limit


COMPUTES_CALL = "_compiled_call_impl"
"""The attribute of a module whose value, if there is one, computes its call, hooks included. `Module.compile` sets it;
copies and files of the module leave it out."""


def computed_call(module: Any) -> Callable[..., Any]:
    """What computes a module's call without that attribute."""
    call: Callable[..., Any] = module._call_impl
    return call


def float32_precision() -> str:
    """`torch.get_float32_matmul_precision()`, which raises where `fp32_precision` of a backend says otherwise."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def cudnn_takes_tf32() -> bool:
    """Whether cuDNN's convolutions of fp32 may use TF32, by whichever of PyTorch's two settings said so last."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        cudnn: Any = torch.backends.cudnn
        return bool(cudnn.conv.fp32_precision == "tf32")
