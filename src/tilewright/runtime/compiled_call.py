"""The callable of a compiled program: the first call runs AOTAutograd's wrappers, later ones C++ alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from tilewright.launch.executor import EXTENSION

if TYPE_CHECKING:
    from tilewright.capture.plain_call import Called


def compiled_call(called: Called) -> Callable[..., Any]:
    """A function of the program's inputs that returns the list of its results.

    AOTAutograd's wrappers run the first call, since they check the user's operators, and all calls until the executor
    is built.
    """
    otherwise = called.otherwise
    was_called = False
    native: Callable[..., Any] | None = None

    def call(*args: Any) -> Any:
        nonlocal native, was_called
        if native is None and was_called and (module := EXTENSION.found) is not None:
            native = partial(module.call_compiled, module.compiled(_as_data(called)))
        if native is not None:
            return native(*args)
        results = otherwise(*args)
        was_called = True
        return results

    return call


def _as_data(called: Called) -> tuple[Any, ...]:
    """`called` in the form that native/executor.cpp reads."""
    plain, autograd = called.plain, called.plain.autograd
    functions = called.forward, called.backward, called.otherwise, called.stand_in, called.mark, called.second
    if autograd is None:
        return *functions, plain.are_tensors, (), (), (), 0, 0, called.disables_autocast, False
    first = autograd.numbers + autograd.checked + autograd.unchecked
    tangents = [
        (result, lies, first + number in called.undefined) for number, (result, lies) in enumerate(autograd.tangents)
    ]
    return (
        *functions, plain.are_tensors, autograd.differentiable, autograd.detached, tangents, autograd.checked,
        autograd.unchecked, called.disables_autocast, autograd.refuses_determinism,
    )  # fmt: skip
