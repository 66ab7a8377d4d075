"""Records the torch functions that a program calls, without computing anything.

Dynamo needs about a millisecond for a call and AOTAutograd two more: a minute and a half for a loop of 35,000
calls. Here the program runs once on meta tensors, at about 60 µs a call, which shows whether its calls repeat
(`call_cycles.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from tilewright.graph.source import user_frame
from tilewright.pytorch.state import autocasts
from tilewright.records.progress import tell

READS_VALUES = frozenset(
    ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "get_device", "nonzero")
)
DIFFERENTIATES = frozenset(("backward", "grad", "data", "requires_grad_", "detach_", "register_hook", "data_ptr"))
PLAIN = (int, float, complex, str, type(None), type(...), torch.dtype, torch.device, torch.memory_format, torch.layout)
"""Classes of the arguments that a graph holds beside tensors and containers of them."""


@dataclass(frozen=True)
class Value:
    """The result of a call, `place` among several; place -1 if it is the only one."""

    call: int
    place: int


@dataclass(frozen=True)
class Leaf:
    """A tensor that no call made: an input or a parameter."""

    number: int


Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]
"""Shape, strides, dtype, and whether a gradient is required."""


@dataclass(frozen=True)
class FunctionCall:
    """One call; its arguments have a `Value` or a `Leaf` in place of each tensor."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    specs: tuple[Spec | None, ...]
    """One for each result, in order."""
    place: tuple[str, int, str]
    """File, line and function of the user's code."""


@dataclass
class FunctionCalls:
    """The calls of a program in order, its results, and its inputs and parameters in the order of their first use."""

    calls: list[FunctionCall] = field(default_factory=list)
    results: list[Value | Leaf] = field(default_factory=list)
    leaves: list[torch.Tensor] = field(default_factory=list)


class _NotRecorded(Exception):
    """The program reads values, differentiates, or changes a mode, which a list of calls does not represent."""


def function_calls(
    call: Callable[[], Any], function: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> FunctionCalls | None:
    """The calls of `call()`, which calls `function` with `inputs`; None where a list of calls is not the whole program.

    Attributes that modules set while they run are set back.
    """
    recorder = _Recorder(inputs[0].device if inputs else torch.device("cpu"))
    modules = [*function.modules()] if isinstance(function, torch.nn.Module) else []
    try:
        with _restored(modules), recorder:
            results = call()
        recorder.calls.results = [recorder.reference(x) for x in _tensors(results)]
    except Exception:
        # Dynamo, which captures the program then, says what is wrong and where.
        return None
    return recorder.calls


class _Recorder(TorchFunctionMode):
    """Calls functions with meta tensors; a tensor that no call made is a leaf, with a meta tensor like it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.calls = FunctionCalls()
        self.constructors = _device_constructors()
        self.gradients = torch.is_grad_enabled()
        self.made: dict[int, tuple[Value, torch.Tensor]] = {}
        """By the identity of a tensor, which is kept alive."""
        self.tensors: list[list[torch.Tensor | None]] = []
        """The results of each call."""
        self.leaves: dict[int, Leaf] = {}
        self.twins: list[torch.Tensor] = []
        """A meta tensor like each leaf."""
        self.known: dict[Any, tuple[tuple[Spec | None, ...], bool]] = {}
        """By function and kinds of arguments: the specs of the results, and whether it is one tensor."""
        self.of_device = {
            "device": device,
            "is_cpu": device.type == "cpu",
            "is_cuda": device.type == "cuda",
            "is_meta": False,
        }

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name == "__get__":
            name = attribute_of(function)
            if name in self.of_device:
                return self.of_device[name]
        if name in READS_VALUES or name in DIFFERENTIATES:
            raise _NotRecorded(name)
        read, by_name = self.reference(args), self.reference(kwargs or {})
        key = None if _writes(name) else (function, self._kind(read), self._kind(by_name))
        if key in self.known:
            specs, alone = self.known[key]
            several = [None if spec is None else _like(spec) for spec in specs]
            result: Any = several[0] if alone else tuple(several)
        else:
            result = self._called(function, read, by_name)
            alone = isinstance(result, torch.Tensor)
            if not alone and not _tensors(result) and name != "__setitem__":
                return result
            several = [result] if alone else list(result or ())
            if not all(isinstance(x, (torch.Tensor, type(None))) for x in several):
                raise _NotRecorded("results in results")
            specs = tuple(None if x is None else _spec(x) for x in several)
            # The class of several results may name them: torch.max(x, 0).values.
            if key is not None and (alone or type(result) in (tuple, list)):
                self.known[key] = specs, alone
        if torch.is_grad_enabled() != self.gradients or autocasts():
            raise _NotRecorded("another mode")
        number = len(self.calls.calls)
        if number % 1000 == 0:
            tell("calls recorded", number)
        self.calls.calls.append(FunctionCall(function, read, by_name, specs, _place(sys._getframe(1))))
        self.tensors.append(several)
        for place, tensor in enumerate(several):
            if tensor is not None:
                self.made[id(tensor)] = Value(number, -1 if alone else place), tensor
        return result

    def _called(self, function: Any, args: Any, kwargs: Any) -> Any:
        """The results of `function` for meta tensors."""
        named = map_aggregate(kwargs, self._on_meta)
        if function in self.constructors:
            named = {**named, "device": "meta"}
        return function(*map_aggregate(args, self._on_meta), **named)

    def reference(self, x: Any) -> Any:
        """`x` with a `Value` or `Leaf` for each tensor. Raises `_NotRecorded` for what a graph cannot hold."""
        return map_aggregate(x, self._reference)

    def _reference(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            made = self.made.get(id(x))
            return made[0] if made is not None else self._leaf(x)
        if isinstance(x, PLAIN):
            return x
        raise _NotRecorded(type(x).__name__)

    def _leaf(self, x: torch.Tensor) -> Leaf:
        if id(x) not in self.leaves:
            if x.is_meta:
                raise _NotRecorded("a tensor of unknown origin")
            self.leaves[id(x)] = Leaf(len(self.twins))
            self.twins.append(_like(_spec(x)))
            self.calls.leaves.append(x)
        return self.leaves[id(x)]

    def _on_meta(self, x: Any) -> Any:
        match x:
            case Value(call, place):
                return self.tensors[call][max(place, 0)]
            case Leaf(number):
                return self.twins[number]
            case torch.device():
                return torch.device("meta")
        return x

    def _kind(self, x: Any) -> Any:
        """`x` with the specs of results in place of references to them; tells True, 1 and 1.0 apart."""
        match x:
            case Value(call, place):
                return self.calls.calls[call].specs[max(place, 0)]
            case Leaf(number):
                return _spec(self.twins[number])
            case dict():
                return tuple((name, self._kind(item)) for name, item in x.items())
            case tuple() | list():
                return tuple(map(self._kind, x))
            case slice():
                return slice, self._kind((x.start, x.stop, x.step))
        return type(x), x


def attribute_of(function: Any) -> str:
    """The name of the attribute that `function` reads, as of `Tensor.T.__get__`."""
    return str(getattr(function.__self__, "__name__", ""))


def _writes(name: str) -> bool:
    """Whether a function of this name changes an operand, whose shape may then be another."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__"))


def _like(spec: Spec) -> torch.Tensor:
    shape, strides, dtype, requires_grad = spec
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta", requires_grad=requires_grad)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _spec(x: torch.Tensor) -> Spec:
    return tuple(x.size()), x.stride(), x.dtype, x.requires_grad


def _place(frame: FrameType | None) -> tuple[str, int, str]:
    """File, line and function of the innermost frame of the user's code."""
    found = user_frame(frame)
    return ("", 0, "") if found is None else (found.f_code.co_filename, found.f_lineno, found.f_code.co_name)


@contextmanager
def _restored(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    def attributes(module: torch.nn.Module) -> dict[str, Any]:
        # Parameters, buffers and submodules are in dictionaries of their own.
        return {name: dict(item) if isinstance(item, dict) else item for name, item in vars(module).items()}

    before = [attributes(module) for module in modules]
    try:
        yield
    finally:
        for module, held in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(held)
