"""Named ranges around steps, phases and layers of an unmodified model.

In a trace they are slices: `ProfilerStep#7`, `phase forward`, `phase backward`, `phase optimizer`, `layer
encoder.0.norm1`. For Nsight Systems they are NVTX ranges with the same names.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from time import time_ns
from typing import TYPE_CHECKING, Any, Protocol, Self
from weakref import ref

from tilewright.measure.recording.compilation import Replacements, named_as
from tilewright.measure.recording.modules import FORWARD, LayerNames, layer_names
from tilewright.records.errors import warn_once

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import nn

STEP = "ProfilerStep#"
PHASE = "phase "


class Marker(Protocol):
    """Opens a range of that name on the calling thread and returns the function that closes it."""

    def __call__(self, name: str) -> Callable[[], None]: ...


class Log(Protocol):
    """The begins and ends of the ranges of one thread: `log += (time, name)` begins one, `log += (time, None)` ends the
    innermost, both in nanoseconds since 1970. A list is one; a range named "" is none."""

    def __iadd__(self, entry: tuple[int, str | None], /) -> Self: ...


class _Marked:
    """A log that opens and closes ranges of a marker at once."""

    def __init__(self, mark: Marker) -> None:
        self._mark = mark
        self._open: list[Callable[[], None] | None] = []

    def __iadd__(self, entry: tuple[int, str | None], /) -> Self:
        if (name := entry[1]) is not None:
            self._open.append(self._mark(name) if name else None)
        elif self._open and (close := self._open.pop()):
            close()
        return self


def nvtx(name: str) -> Callable[[], None]:
    """An NVTX range."""
    import torch

    torch.cuda.nvtx.range_push(name)
    return lambda: torch.cuda.nvtx.range_pop() and None


class Ranges:
    """Between `start` and `stop`, ranges for every module, backward pass and optimizer step of this process.

    A module that is not called from another module's `forward` is a model: its call is the phase `forward`, and
    each of its submodules is a layer, named by its path in the model. `torch.autograd.backward` and `grad` are
    the phase `backward`. A compiled region has none of them, since `replacements` hides the hooks there. At other
    times while entered only the optimizers have hooks, so that steps without a profiler are as fast as without this.

    `after_step` is called after every step of an optimizer, with it, on its thread.
    """

    def __init__(
        self, replacements: Replacements, *, layers: bool = True,
        after_step: Callable[[torch.optim.Optimizer], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._mark: Marker | None = None
        self._replacements = replacements
        self._layers = layers
        self._after_step = after_step
        self._names: dict[int, tuple[ref[nn.Module], LayerNames]] = {}
        self._thread = _OpenRanges()
        self._entered = ExitStack()
        self._started = ExitStack()

    def __enter__(self) -> Ranges:
        from torch.optim import optimizer

        # Not in `start`: it is called from such a hook, while PyTorch iterates over them.
        hook, entry = object(), self._replacements.entry
        self._entered.enter_context(entry(optimizer._global_optimizer_pre_hooks, hook, self._enter_optimizer))
        self._entered.enter_context(entry(optimizer._global_optimizer_post_hooks, hook, self._leave_optimizer))
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

    def start(self, mark: Marker, new_log: Callable[[], Log] | None = None, *, modules: bool = True) -> None:
        """Make ranges by `mark` from here on, those of phases and of `modules` in logs of each thread if `new_log`
        makes them."""
        from torch.nn.modules import module

        self._mark, self._thread = mark, _OpenRanges(new_log or partial(_Marked, mark))
        hook, entry = object(), self._replacements.entry
        for hooks, value in (
            (module._global_forward_pre_hooks, self._enter_module),
            (module._global_forward_hooks_always_called, True),
            (module._global_forward_hooks, self._leave_module),
        ):
            if modules:
                self._started.enter_context(entry(hooks, hook, value))
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

    # With stacks the profiler records every call in these two, of Python's and of C's, which takes more than they do.
    def _enter_module(self, module: nn.Module, _: Any) -> None:
        if self._mark is None:
            return
        thread = self._thread
        try:
            name = ""
            if not thread.modules:
                thread.names = self._names_in(module)
                name = FORWARD
            else:
                try:
                    layer, name = thread.names[id(module)]
                    if layer() is not module:
                        name = ""
                except KeyError:
                    pass
            thread.modules += (module,)
            thread.log += (time_ns(), name)
        except Exception as error:
            self._fails(error)

    def _leave_module(self, module: nn.Module, _: Any, __: Any) -> None:
        thread = self._thread
        opened = thread.modules
        try:
            # An exception may have skipped the exits of inner modules: their ranges end too.
            if opened and (opened[-1] is module or any(module is entered for entered in opened)):
                while True:
                    left = opened[-1]
                    del opened[-1]
                    thread.log += (time_ns(), None)
                    if left is module:
                        return
        except Exception as error:
            self._fails(error)

    def _names_in(self, model: nn.Module) -> LayerNames:
        """The name of each layer's range; no layers if these are not asked for."""
        if not self._layers:
            return {}
        known = self._names.get(id(model))
        if known and known[0]() is model:
            return known[1]
        named = layer_names(model)
        self._names[id(model)] = ref(model), named
        return named

    def _fails(self, error: Exception) -> None:
        self._mark = None
        warn_once(f"ranges of phases and layers end here: {type(error).__name__}: {error}")

    def _enter_optimizer(self, *_: Any) -> None:
        if self._mark:
            self._thread.updates += 1
            self._thread.phases += (time_ns(), PHASE + "optimizer")

    def _leave_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._thread.updates:
            self._thread.updates -= 1
            self._thread.phases += (time_ns(), None)
        # PyTorch iterates over the hooks here, which may not be taken back meanwhile.
        with self._replacements.held:
            self._after_step(optimizer)

    @contextmanager
    def _around_backward(self) -> Iterator[None]:
        """Wrap both functions in `torch.autograd`; `Tensor.backward` looks them up at each call."""
        import torch

        def ranged(function: Callable[..., Any]) -> Callable[..., Any]:
            @named_as(function)
            def call(*arguments: Any, **options: Any) -> Any:
                if self._mark is None:
                    return function(*arguments, **options)
                phases = self._thread.phases
                phases += (time_ns(), PHASE + "backward")
                try:
                    return function(*arguments, **options)
                finally:
                    phases += (time_ns(), None)

            return call

        with ExitStack() as stack:
            for name in ("backward", "grad"):
                replacement = ranged(getattr(torch.autograd, name))
                stack.enter_context(self._replacements.attribute(torch.autograd, name, replacement))
            yield


class _OpenRanges(threading.local):
    """The open ranges of one thread, outermost first."""

    def __init__(self, new_log: Callable[[], Log] = list) -> None:
        self.names: LayerNames = {}
        self.modules: list[torch.nn.Module] = []
        self.log = new_log()
        self.phases = new_log()
        self.updates = 0
