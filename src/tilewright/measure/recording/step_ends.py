"""Which call of an unmodified program ends a step: of an optimizer, else of backward, else of a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

from tilewright.measure.recording.compilation import Replacements, named_as

_MODEL, _BACKWARD, _OPTIMIZER = 1, 2, 3


class _Leader:
    """Of several that take turns, the one by which turns are counted: the first, or one that comes again without it."""

    def __init__(self) -> None:
        self._leader: Callable[[], object] = lambda: None
        self._others: list[Callable[[], object]] = []

    def is_turn_of(self, one: object) -> bool:
        leader = self._leader()
        if leader is not None and one is not leader and not any(one is other() for other in self._others):
            self._others.append(ref(one))
            return False
        self._leader = ref(one)
        self._others.clear()
        return True


class StepEnds:
    """Calls `ended` at the end of each step of the program.

    An optimizer's step ends one. While entered, in a program that makes no optimizer of PyTorch's, `torch.autograd`'s
    `backward` or `grad` does so, and in one that does not differentiate a call of a module that is in no other's and
    has parameters: those without transform samples. Of several optimizers, or models, the same one ends all steps.
    `anew` is called where what ended steps until then was a part of one; it says whether they can be counted anew.
    """

    def __init__(
        self, replacements: Replacements, ended: Callable[[], None], anew: Callable[[], bool] = lambda: True
    ) -> None:
        self._replacements = replacements
        self._ended, self._anew = ended, anew
        self._kind = 0
        self._leaders = {_MODEL: _Leader(), _OPTIMIZER: _Leader()}
        self._thread = threading.get_ident()
        self._called: list[Any] = []
        """The modules that are called, outermost first."""
        self._entered, self._calls = ExitStack(), ExitStack()

    def __enter__(self) -> StepEnds:
        from torch.nn.modules import module
        from torch.optim import Optimizer

        hook, entry = object(), self._replacements.entry
        for hooks, value in (
            (module._global_forward_pre_hooks, self._enter_module),
            (module._global_forward_hooks_always_called, True),
            (module._global_forward_hooks, self._leave_module),
        ):
            self._calls.enter_context(entry(hooks, hook, value))
        self._calls.enter_context(self._around_backward())
        initialise = Optimizer.__init__

        @named_as(initialise)
        def init(optimizer: Any, *arguments: Any, **options: Any) -> None:
            # Only its steps count from here on.
            self._calls.close()
            initialise(optimizer, *arguments, **options)

        self._entered.enter_context(self._replacements.attribute(Optimizer, "__init__", init))
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.close()
        self._entered.close()

    def optimizer_stepped(self, optimizer: object) -> None:
        self._calls.close()
        if self._leaders[_OPTIMIZER].is_turn_of(optimizer):
            self._end(_OPTIMIZER)

    def _end(self, kind: int) -> None:
        if kind > self._kind:
            if self._kind and not self._anew():
                return
            self._kind = kind
        if kind == self._kind:
            self._ended()

    @contextmanager
    def _around_backward(self) -> Iterator[None]:
        import torch

        def ending(function: Callable[..., Any]) -> Callable[..., Any]:
            @named_as(function)
            def call(*arguments: Any, **options: Any) -> Any:
                result = function(*arguments, **options)
                if threading.get_ident() == self._thread:
                    self._end(_BACKWARD)
                return result

            return call

        with ExitStack() as stack:
            for name in ("backward", "grad"):
                replacement = ending(getattr(torch.autograd, name))
                stack.enter_context(self._replacements.attribute(torch.autograd, name, replacement))
            yield

    def _enter_module(self, module: Any, _: Any) -> None:
        if threading.get_ident() == self._thread:
            self._called.append(module)

    def _leave_module(self, module: Any, _: Any, __: Any) -> None:
        if threading.get_ident() != self._thread or not any(module is called for called in self._called):
            return
        # An exception may have skipped the exits of inner modules.
        while self._called.pop() is not module:
            pass
        if self._called or next(module.parameters(), None) is None:
            return
        if self._leaders[_MODEL].is_turn_of(module):
            self._end(_MODEL)
