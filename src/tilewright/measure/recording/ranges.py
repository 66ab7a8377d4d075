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


def nvtx(name: str) -> Callable[[], None]:
    """An NVTX range."""
    import torch

    torch.cuda.nvtx.range_push(name)
    return lambda: torch.cuda.nvtx.range_pop() and None


class Ranges:
    """Between `start` and `stop`, ranges for every module, backward pass and optimizer step of this process.

    A module that is not called from another module's `forward` is a model: its call is the phase `forward`, and
    each of its submodules is a layer, named by its path in the model. `torch.autograd.backward` and `grad` are
    the phase `backward`. A compiled model has no layers: hooks do not run in it. At other times while entered
    only the optimizers have hooks, so that steps without a profiler are as fast as without this.

    `after_step` is called after every step of an optimizer, on its thread.
    """

    def __init__(self, *, layers: bool = True, after_step: Callable[[], None] = lambda: None) -> None:
        self._mark: Marker | None = None
        self._layers = layers
        self._after_step = after_step
        self._names: WeakKeyDictionary[nn.Module, dict[nn.Module, str]] = WeakKeyDictionary()
        self._thread = _OpenRanges()
        self._is_compiling: Callable[[], bool] = lambda: False
        self._entered = ExitStack()
        self._started = ExitStack()

    def __enter__(self) -> Ranges:
        from torch.optim import optimizer

        # Not in `start`: it is called from such a hook, while PyTorch iterates over them.
        handles = (
            optimizer.register_optimizer_step_pre_hook(self._enter_optimizer),
            optimizer.register_optimizer_step_post_hook(self._leave_optimizer),
        )
        for handle in handles:
            self._entered.callback(handle.remove)
        self._entered.enter_context(warnings.catch_warnings())
        # The extra call of the hooks for the wrapper of a compiled model is expected.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._entered.close()

    @property
    def on(self) -> bool:
        return self._mark is not None

    def start(self, mark: Marker) -> None:
        """Make ranges by `mark` from here on."""
        import torch
        from torch.nn.modules import module

        self._mark, self._thread = mark, _OpenRanges()
        self._is_compiling = torch.compiler.is_compiling
        handles = (
            module.register_module_forward_pre_hook(self._enter_module),
            module.register_module_forward_hook(self._leave_module, always_call=True),
        )
        for handle in handles:
            self._started.callback(handle.remove)
        self._started.enter_context(self._around_backward())

    def stop(self) -> None:
        """Make no more ranges; those that are open end as they would."""
        self._mark = None
        self._started.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The range `phase <name>` around a block of code."""
        with self.named(PHASE + name):
            yield

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """The range of that name around a block of code."""
        close = self._mark(name) if self._mark else None
        try:
            yield
        finally:
            if close:
                close()

    # With stacks the profiler records every call in these two, which take most of the time of a small layer's.
    def _enter_module(self, module: nn.Module, _: Any) -> None:
        mark, thread = self._mark, self._thread
        if mark is None or self._is_compiling():
            return
        name: str | None = ""
        if not thread.modules:
            thread.names = self._names_in(module)
            name = PHASE + "forward"
        elif module in thread.names:
            name = thread.names[module]
        thread.modules += ((module, mark(name) if name else None),)

    def _leave_module(self, module: nn.Module, _: Any, __: Any) -> None:
        opened = self._thread.modules
        if not opened or self._is_compiling():
            return
        if opened[-1][0] is not module and not any(module is entered for entered, _ in opened):
            return
        # An exception may have skipped the exits of inner modules: close their ranges too.
        while opened:
            entered, close = opened[-1]
            del opened[-1]
            if close:
                close()
            if entered is module:
                return

    def _names_in(self, model: nn.Module) -> dict[nn.Module, str]:
        """The name of each layer's range; no layers if these are not asked for."""
        if not self._layers:
            return {}
        if model not in self._names:
            wrappers = ("_orig_mod.", "module.")
            named = {}
            for name, layer in model.named_modules():
                for wrapper in wrappers:
                    name = name.removeprefix(wrapper)
                named[layer] = LAYER + name if name else ""
            self._names[model] = named
        return self._names[model]

    def _enter_optimizer(self, *_: Any) -> None:
        if self._mark:
            self._thread.optimizers.append(self._mark(PHASE + "optimizer"))

    def _leave_optimizer(self, *_: Any) -> None:
        if self._thread.optimizers:
            self._thread.optimizers.pop()()
        self._after_step()

    @contextmanager
    def _around_backward(self) -> Iterator[None]:
        """Wrap both functions in `torch.autograd`; `Tensor.backward` looks them up at each call."""
        import torch

        before = {name: getattr(torch.autograd, name) for name in ("backward", "grad")}

        def ranged(function: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(function)
            def call(*arguments: Any, **options: Any) -> Any:
                if self._mark is None or self._is_compiling():
                    return function(*arguments, **options)
                close = self._mark(PHASE + "backward")
                try:
                    return function(*arguments, **options)
                finally:
                    close()

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
        self.names: dict[nn.Module, str] = {}
        self.modules: list[tuple[torch.nn.Module, Callable[[], None] | None]] = []
        self.optimizers: list[Callable[[], None]] = []
