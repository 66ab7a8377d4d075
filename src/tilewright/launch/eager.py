"""Own operators called eagerly: recipes performed without PyTorch's dispatcher, which costs the host more than most
kernels cost the GPU.

If only autograd observes the call, `native/operator.h` finds the recipe of the call's kind and performs it; for a new
kind the recipe is built first. `torch.compile`, other tracers, modes, transforms and tensor subclasses observe the
operator through the dispatcher, which ends at the same recipe.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from tilewright.graph.pytorch_state import below_autograd, functions_watched, profiled, watched
from tilewright.launch.executor import EXTENSION, native_recipe
from tilewright.launch.gradient import Gradient
from tilewright.launch.triton import is_interpreted
from tilewright.records.recipe import Recipe

Function = Callable[..., Any]
DISPATCH, RECORD, NO_RECIPE = range(3)
"""Why the executor returns no result for a call, as in native/operator.h: PyTorch's dispatcher must see the operator;
Python computes its gradient; no kernel takes the call."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_observers: list[None] = []


@contextlib.contextmanager
def launches_in_python() -> Iterator[None]:
    """Inside, every call builds its recipe anew and launches it from Python, Triton's kernels by Triton's launcher."""
    _observers.append(None)
    try:
        yield
    finally:
        _observers.pop()


def are_launches_in_python() -> bool:
    """Whether `launches_in_python` is on."""
    return bool(_observers)


class _Native(NamedTuple):
    """An operator in C++: each gives results, or what `DISPATCH` and the others say."""

    call: Function
    known: Function
    below: Function


class EagerOperator:
    """One operator, and the calls of it: by the user, and below autograd."""

    def __init__(
        self, operator: Any, build: Callable[..., Recipe | None], perform: Function, implementation: Function,
        gradient: Gradient | tuple[Function, Function | None] | None,
    ) -> None:  # fmt: skip
        """Every function takes the operator's arguments.

        `operator` is an overload of `torch.ops`; `build` gives the call's recipe, if it has one; `perform` the tuple of
        that recipe's results, from Python; `implementation` the results of a call without a recipe. `gradient` is plain
        data, or else `backward` and `save` as `torch.library.register_autograd` takes them.
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
        native = self._native or self._found(arguments)
        found = native.call(*arguments) if native else self._answer(arguments)
        if type(found) is not int:
            return found
        # In Python only the dispatcher reports a call to a profiler.
        if found == DISPATCH or profiled():
            return self.operator(*arguments)
        if found == RECORD:
            return self.recorded(*arguments)
        return self.implementation(*arguments) if native else self.below(*arguments)

    def known(self, *arguments: Any) -> Any:
        """The results of a call by the user of a kind that was called before, whose arguments were checked then.

        None, and nothing done, for any other call, while PyTorch compiles, and inside `launches_in_python`.
        """
        if torch.compiler.is_compiling() or _observers or self._native is None:
            return None
        found = self._native.known(*arguments)
        return None if type(found) is int else found

    def below(self, *arguments: Any) -> Any:
        """The results of a call that PyTorch's dispatcher or autograd have seen."""
        native = None if _observers else self._native or self._found(arguments)
        if native:
            found = native.below(*arguments)
            return self.implementation(*arguments) if type(found) is int else found
        results = self.perform(*arguments)
        if results is None:
            return self.implementation(*arguments)
        # PyTorch takes None for no results.
        return results[0] if self.has_one_result else results or None

    def _found(self, arguments: tuple[Any, ...]) -> _Native | None:
        """The operator in C++; None until that is built, which a call on a GPU begins."""
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
        """The executor's answer to a call without a known recipe."""
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        # Only the dispatcher resolves a negative view.
        plain = all(type(x) in _PLAIN and not x.is_neg() for x in tensors)
        if not plain or watched() or functions_watched():
            return DISPATCH
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        return RECORD if wanted and not below_autograd() else NO_RECIPE


def known_of(call: Function) -> Function:
    """`EagerOperator.known` of the operator whose `call` this is."""
    owner = getattr(call, "__self__", None)
    assert isinstance(owner, EagerOperator)
    return owner.known


def _recorded(operator: EagerOperator, backward: Function, save: Function | None) -> Function:
    """The operator in a node of autograd's graph."""

    def forward(ctx: Any, *arguments: Any) -> Any:
        result = operator.below(*arguments)
        if save is not None:
            save(ctx=ctx, inputs=arguments, output=result)
        return result

    # Compiled autograd takes a function, and no method of an object.
    def computed(ctx: Any, *gradients: Any) -> Any:
        return backward(ctx, *gradients)

    methods = {"forward": staticmethod(forward), "backward": staticmethod(computed)}
    made = type(_node_name(operator.name), (torch.autograd.Function,), methods)
    # What `Function.apply` does before its base's is look for functorch, which does not watch this call.
    applied: Function = super(torch.autograd.Function, made).apply  # type: ignore[misc]
    return applied


def _node_name(operator: str) -> str:
    """Of a node in autograd's graph.

    >>> _node_name("tilewright::cross_entropy")
    'TilewrightCrossEntropy'
    """
    return "Tilewright" + "".join(part.title() for part in operator.partition("::")[2].split("_"))
