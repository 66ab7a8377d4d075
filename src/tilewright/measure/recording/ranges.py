"""Named ranges around steps, phases and layers of an unmodified model.

In a trace they are slices: `ProfilerStep#7`, `phase forward`, `phase backward`, `phase optimizer`, `layer
encoder.0.norm1`. For Nsight Systems they are NVTX ranges with the same names.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

STEP = "ProfilerStep#"
PHASE = "phase "
LAYER = "layer "


class Marker(Protocol):
    """Opens a range of that name on the calling thread and returns the function that closes it."""

    def __call__(self, name: str) -> Callable[[], None]: ...


def recorded(name: str) -> Callable[[], None]:
    """A range in PyTorch's profiler; a few microseconds if none is running."""
    from torch.profiler import record_function

    span = record_function(name)
    span.__enter__()
    return lambda: span.__exit__(None, None, None)


def nvtx(name: str) -> Callable[[], None]:
    """An NVTX range."""
    import torch

    torch.cuda.nvtx.range_push(name)
    return lambda: torch.cuda.nvtx.range_pop() and None


class Ranges:
    """While entered, makes ranges for every module, backward pass and optimizer step of this process.

    A module that is not called from another module's `forward` is a model: its call is the phase `forward`, and
    each of its submodules is a layer, named by its path in the model. `torch.autograd.backward` and `grad` are
    the phase `backward`. A compiled model has no layers: hooks do not run in it. While `on` is False no ranges
    are made, and a hook takes well below a microsecond.

    `after_step` is called after every step of an optimizer, on its thread.
    """

    def __init__(
        self, mark: Marker = recorded, *, layers: bool = True, after_step: Callable[[], None] = lambda: None
    ) -> None:
        self.on = True
        self._mark = mark
        self._layers = layers
        self._after_step = after_step
        self._names: WeakKeyDictionary[nn.Module, dict[nn.Module, str]] = WeakKeyDictionary()
        self._thread = _OpenRanges()
        self._installed = ExitStack()

    def __enter__(self) -> Ranges:
        from torch.nn.modules import module
        from torch.optim import optimizer

        handles = (
            module.register_module_forward_pre_hook(self._enter_module),
            module.register_module_forward_hook(self._leave_module, always_call=True),
            optimizer.register_optimizer_step_pre_hook(self._enter_optimizer),
            optimizer.register_optimizer_step_post_hook(self._leave_optimizer),
        )
        for handle in handles:
            self._installed.callback(handle.remove)
        self._installed.enter_context(self._around_backward())
        self._installed.enter_context(warnings.catch_warnings())
        # The extra call of the hooks for the wrapper of a compiled model is expected.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
        return self

    def __exit__(self, *_: object) -> None:
        self._installed.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The range `phase <name>` around a block of code."""
        with self.named(PHASE + name):
            yield

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """The range of that name around a block of code."""
        close = self._mark(name) if self.on else None
        try:
            yield
        finally:
            if close:
                close()

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        import torch

        if torch.compiler.is_compiling():
            return
        stack = self._thread.modules
        closing: Callable[[], None] | None = None
        if self.on and not stack:
            closing = self._mark(PHASE + "forward")
        elif self.on and self._layers:
            name = self._names_in(stack[0][0]).get(module)
            closing = self._mark(LAYER + name) if name else None
        stack.append((module, closing))

    def _leave_module(self, module: nn.Module, _: Any, __: Any) -> None:
        import torch

        stack = self._thread.modules
        if torch.compiler.is_compiling() or not any(module is entered for entered, _ in stack):
            return
        # An exception may have skipped the exits of inner modules: close their ranges too.
        while stack:
            entered, close = stack.pop()
            if close:
                close()
            if entered is module:
                return

    def _names_in(self, model: nn.Module) -> dict[nn.Module, str]:
        if model not in self._names:
            wrappers = ("_orig_mod.", "module.")
            named = {}
            for name, layer in model.named_modules():
                for wrapper in wrappers:
                    name = name.removeprefix(wrapper)
                named[layer] = name
            self._names[model] = named
        return self._names[model]

    def _enter_optimizer(self, *_: Any) -> None:
        self._thread.optimizers.append(self._mark(PHASE + "optimizer") if self.on else None)

    def _leave_optimizer(self, *_: Any) -> None:
        close = self._thread.optimizers.pop() if self._thread.optimizers else None
        if close:
            close()
        self._after_step()

    @contextmanager
    def _around_backward(self) -> Iterator[None]:
        """Wrap both functions in `torch.autograd`; `Tensor.backward` looks them up at each call."""
        import torch

        before = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}

        def ranged(function: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(function)
            def call(*arguments: Any, **options: Any) -> Any:
                if torch.compiler.is_compiling():
                    return function(*arguments, **options)
                with self.phase("backward"):
                    return function(*arguments, **options)

            return call

        for name, function in before.items():
            setattr(torch.autograd, name, ranged(function))
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(torch.autograd, name, function)


class _OpenRanges(threading.local):
    """The open ranges of one thread, outermost first."""

    def __init__(self) -> None:
        self.modules: list[tuple[torch.nn.Module, Callable[[], None] | None]] = []
        self.optimizers: list[Callable[[], None] | None] = []
