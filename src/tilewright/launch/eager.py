"""Eager calls of tilewright's operators without PyTorch's dispatcher, which costs the host more than most kernels cost
the GPU.

If only autograd observes the call, `native/operator.h` looks up the recipe for the arguments' metadata and performs
it; the first call with such metadata builds the recipe. `torch.compile`, other tracers, modes, transforms and tensor
subclasses observe the operator through the dispatcher, which performs the same recipe.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from tilewright.launch.executor import EXTENSION, native_recipe
from tilewright.launch.gradient import Gradient
from tilewright.launch.triton import is_interpreted
from tilewright.pytorch.state import below_autograd, functions_watched, profiled, watched
from tilewright.records.recipe import Recipe

Function = Callable[..., Any]
DISPATCH, RECORD, NO_RECIPE, NO_KEY = range(4)
"""Why the executor returns no result (native/operator.h): PyTorch's dispatcher must see the operator; Python computes
its gradient; no kernel takes the call; the call has no key, and Python looks for its recipe."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_observers: list[None] = []


@contextlib.contextmanager
def launches_in_python() -> Iterator[None]:
    """In this block every call builds its recipe anew and launches from Python, Triton kernels by Triton's launcher."""
    _observers.append(None)
    try:
        yield
    finally:
        _observers.pop()


def are_launches_in_python() -> bool:
    """Whether `launches_in_python` is on."""
    return bool(_observers)


class _Native(NamedTuple):
    """An operator in the C++ executor: each function gives the results, or `DISPATCH`, `RECORD` or `NO_RECIPE`."""

    call: Function
    known: Function
    below: Function


class EagerOperator:
    """One operator, called by the user or below autograd."""

    def __init__(
        self, operator: Any, build: Callable[..., Recipe | None], perform: Function, implementation: Function,
        gradient: Gradient | tuple[Function, Function | None] | None,
    ) -> None:  # fmt: skip
        """Every function takes the operator's arguments.

        `operator` is an overload of `torch.ops`. `build` returns the call's recipe or None; `perform` runs that recipe
        from Python and returns its results as a tuple, or None; `implementation` computes a call without a recipe.
        `gradient` is a `Gradient`, or `backward` and `save` as `torch.library.register_autograd` takes them.
        """
        self.operator = operator
        self.name: str = operator.name()
        self.build, self.perform, self.implementation = build, perform, implementation
        self.has_one_result = len(operator._schema.returns) == 1
        self.gradient = gradient if isinstance(gradient, Gradient) else None
        pair = (gradient.backward, gradient.save) if isinstance(gradient, Gradient) else gradient
        self.recorded = operator if pair is None else _recorded(self, *pair)
        self._native: _Native | None = None

    def call(self, *arguments: Any) -> Any:
        """The results of a call by the user."""
        if torch.compiler.is_compiling() or _observers:
            return self.operator(*arguments)
        native = self._native or self._native_operator(arguments)
        answer = native.call(*arguments) if native else self._answer(arguments)
        if type(answer) is not int:
            return answer
        # Without the executor only the dispatcher reports a call to a profiler.
        if answer == DISPATCH or profiled():
            return self.operator(*arguments)
        if answer == RECORD:
            return self.recorded(*arguments)
        return self.implementation(*arguments) if native else self.below(*arguments)

    def known(self, *arguments: Any) -> Any:
        """The results of a call by the user whose metadata were seen, and its arguments checked, in an earlier call.

        Returns None, and does nothing, for any other call, while PyTorch compiles, and inside `launches_in_python`.
        """
        if torch.compiler.is_compiling() or _observers or self._native is None:
            return None
        answer = self._native.known(*arguments)
        return None if type(answer) is int else answer

    def below(self, *arguments: Any) -> Any:
        """The results of a call that PyTorch's dispatcher or autograd has already handled."""
        native = None if _observers else self._native or self._native_operator(arguments)
        answer = native.below(*arguments) if native else NO_KEY
        if type(answer) is not int:
            return answer
        if answer != NO_KEY:
            return self.implementation(*arguments)
        results = self.perform(*arguments)
        if results is None:
            return self.implementation(*arguments)
        # An operator without results returns None.
        return results[0] if self.has_one_result else results or None

    def _native_operator(self, arguments: tuple[Any, ...]) -> _Native | None:
        """The operator in C++; None until the executor is built. The first call on a GPU starts the build."""
        module = EXTENSION.found
        if module is None and any(isinstance(x, torch.Tensor) and x.is_cuda for x in arguments):
            module = EXTENSION.module()
        if module is None or is_interpreted():
            return None

        def build(*arguments: Any) -> Any:
            recipe = self.build(*arguments)
            return None if recipe is None else native_recipe(module, recipe)

        gradient = self.gradient and self.gradient.as_data(_node_name(self.name))
        known = module.operator(self.has_one_result, build, gradient)
        self._native = _Native(*(functools.partial(call, known) for call in (module.call, module.known, module.below)))
        return self._native

    def _answer(self, arguments: tuple[Any, ...]) -> int:
        """The executor's answer to a call without a recipe, while the executor is not built."""
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        # Only the dispatcher resolves a negative view.
        plain = all(type(x) in _PLAIN and not x.is_neg() for x in tensors)
        if not plain or watched() or functions_watched():
            return DISPATCH
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        return RECORD if wanted and not below_autograd() else NO_RECIPE


def known_of(call: Function) -> Function:
    """`EagerOperator.known` of the operator that has this `call`."""
    owner = getattr(call, "__self__", None)
    assert isinstance(owner, EagerOperator)
    return owner.known


def _recorded(operator: EagerOperator, backward: Function, save: Function | None) -> Function:
    """A function that calls the operator and records it as a node of autograd's graph."""

    def forward(ctx: Any, *arguments: Any) -> Any:
        result = operator.below(*arguments)
        if save is not None:
            save(ctx=ctx, inputs=arguments, output=result)
        return result

    # Compiled autograd accepts a function, not a method of an object.
    def computed(ctx: Any, *gradients: Any) -> Any:
        return backward(ctx, *gradients)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(computed)}
    made = type(_node_name(operator.name), (torch.autograd.Function,), methods)
    # Skip `Function.apply`, which first looks for functorch transforms: none observes this call.
    applied: Function = super(torch.autograd.Function, made).apply  # type: ignore[misc]
    return applied


def _node_name(operator: str) -> str:
    """The name of the operator's node in autograd's graph.

    >>> _node_name("tilewright::cross_entropy")
    'TilewrightCrossEntropy'
    """
    return "Tilewright" + "".join(part.title() for part in operator.partition("::")[2].split("_"))
