"""An operator called eagerly, without PyTorch's dispatcher, which costs the host more than most kernels cost the GPU.

On the host of an H200 a GELU takes 44 µs by `torch.library` and Triton's launcher, 57 where a gradient is wanted; 38
and 43 without the former; 9 and 12 without both, where PyTorch's own takes 8. So where nothing but autograd would see
the operator pass, its implementation is called at once, in a node of PyTorch's own class; and where that only allocates
and launches, `repeat.cpp` does what it did. Everybody else sees the operator: `torch.compile` and every tracer, modes,
transforms, tensors of a class of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from tilewright.graph.capture import below_autograd, functions_watched, profiled, watched
from tilewright.kernels import repeat
from tilewright.launch.eager import are_launches_in_python

Operator = Callable[..., Any]
WATCHED, TRAINED, NEW, SEEN = range(4)
"""What `call` of repeat.cpp answers where it has no result: somebody else would see the operator; a gradient is wanted;
a kind of call that is new, or that nothing repeats; one that was there once, and is to be watched."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def called(
    operator: Any, implementation: Operator, backward: Operator | None, save: Operator | None, repeats: bool
) -> Operator:
    """What to call in place of `operator`, an overload of `torch.ops`; the others are as `registration.define` has."""
    way = _Way(operator, implementation, backward, save, repeats)

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return operator(*arguments)
        return way(arguments)

    return call


class _Way:
    """The ways from a call of one operator to what it does."""

    def __init__(
        self, operator: Any, implementation: Operator, backward: Operator | None, save: Operator | None, repeats: bool
    ) -> None:
        self.operator = operator
        self.name: str = operator.name()
        self.implementation = implementation
        self.repeats = repeats
        self.trained = operator if backward is None else _applied(self, backward, save)
        self._call: Operator | None = None
        self._below: Operator | None = None
        self._known: Any = None

    def __call__(self, arguments: tuple[Any, ...]) -> Any:
        if are_launches_in_python():
            return self.operator(*arguments)
        found = self._call(*arguments) if self._call else self._asked(arguments)
        if type(found) is not int:
            return found
        if found == WATCHED:
            return self.operator(*arguments)
        # What goes on in Python has no name of its own, by which a profiler would show it.
        if found == TRAINED:
            return self.operator(*arguments) if not self.repeats and profiled() else self.trained(*arguments)
        return self.operator(*arguments) if profiled() else self._done(found, arguments)

    def below(self, arguments: tuple[Any, ...]) -> Any:
        """The result of a call that was looked at already, and of which autograd learns nothing."""
        found = self._below(*arguments) if self._below else NEW
        return found if type(found) is not int else self._done(found, arguments)

    def _done(self, found: int, arguments: tuple[Any, ...]) -> Any:
        if found != SEEN:
            return self.implementation(*arguments)
        library = repeat.EXTENSION.found
        assert library is not None
        result, chain = repeat.watched(self.implementation, arguments)
        library.keep(self._native(library), chain, *arguments)
        return result

    def _asked(self, arguments: tuple[Any, ...]) -> Any:
        """What `call` of repeat.cpp gives, or would answer until it is there."""
        library = repeat.EXTENSION.found
        if library is not None:
            native = self._native(library)
            self._below, self._call = (functools.partial(each, native) for each in (library.below, library.call))
            return self._call(*arguments)
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        if self.repeats and any(x.is_cuda for x in tensors):
            repeat.EXTENSION.module()
        # A negative view is made plain by the dispatcher alone.
        plain = all(type(x) in _PLAIN and not x.is_neg() for x in tensors)
        if not plain or watched() or functions_watched() or profiled():
            return WATCHED
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        return TRAINED if wanted and not below_autograd() else NEW

    def _native(self, library: ModuleType) -> Any:
        """The operator as repeat.cpp knows it."""
        if self._known is None:
            self._known = library.operator(self.name, self.repeats, repeat.LINE)
        return self._known


def _applied(way: _Way, backward: Operator, save: Operator | None) -> Operator:
    """The operator in a node of autograd's graph."""

    def forward(ctx: Any, *arguments: Any) -> Any:
        result = way.below(arguments)
        if save is not None:
            save(ctx=ctx, inputs=arguments, output=result)
        return result

    name = "Tilewright" + "".join(part.title() for part in way.name.partition("::")[2].split("_"))
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    made = type(name, (torch.autograd.Function,), methods)
    # What `Function.apply` does before its base's is look for functorch, which does not watch this call.
    applied: Operator = super(torch.autograd.Function, made).apply  # type: ignore[misc]
    return applied
