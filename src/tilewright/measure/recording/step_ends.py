"""Which call of an unmodified program ends a step: of an optimizer, else a derivative, else a call of a model."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any
from weakref import ref

from tilewright.measure.recording.compilation import Replacements, named_as
from tilewright.measure.recording.line_tracer import UserFiles
from tilewright.measure.recording.modules import outermost_modules

_REGION, _MODEL, _KEPT_GRAPH, _BACKWARD, _OPTIMIZER = range(1, 6)
_GONE_THROUGH = "tilewright gone through"
"""Key in the metadata of a node of autograd's."""
_DEEP = 100
_LOOKS = 5
"""How often modules that are made later are looked for: all calls of modules are asked for then."""


class _Leader:
    """Of several that take turns, the one by which turns are counted: the first, or one that comes again without it."""

    def __init__(self) -> None:
        self._leader: Callable[[], object] = lambda: None
        self._others: list[Callable[[], object]] = []
        self.turns = 0
        """Of the one that leads now."""

    @property
    def now(self) -> object:
        """The one that leads, if it is alive."""
        return self._leader()

    def is_turn_of(self, one: object) -> bool:
        leader = self._leader()
        if leader is not None and one is not leader and not any(one is other() for other in self._others):
            self._others.append(ref(one))
            return False
        self.turns = self.turns + 1 if one is leader else 1
        self._leader = ref(one)
        self._others.clear()
        return True


class _Site:
    """A place in the program's code."""


class _Call:
    """Stands in a module for what computes its call, and tells `begun` and `ended` of each."""

    def __init__(self, module: Any, begun: Callable[[], None], ended: Callable[[Any], None]) -> None:
        self._module, self._begun, self._ended = ref(module), begun, ended

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from tilewright.pytorch.state import computed_call

        module = self._module()
        self._begun()
        try:
            return computed_call(module)(*arguments, **options)
        finally:
            self._ended(module)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of the module, or a file of it, has none."""
        return type(None), ()


class StepEnds:
    """Calls `ended` at the end of each step of the program.

    An optimizer's step ends one. While entered, in a program that makes no optimizer of PyTorch's, `torch.autograd`'s
    `backward` or `grad` does so that frees its graph; where none does, the first that goes through a graph, or the
    whole `jacobian` or `hessian` that does. In a program that does not differentiate it is a call of a module that is
    in no other's, has parameters (those without transform samples), and that no optimizer updates: that one will be
    trained. Where no such call is seen it is a call of a compiled function or method, as of a model after its
    `compile()`. Of several optimizers, lines that differentiate, models or functions, the same one ends all steps.
    `anew` is called where what ended steps until then was a part of one; it says whether they can be counted anew.

    A model's first call only shows which one it is: PyTorch tells of the calls of all modules, or of one. From its
    second call on nothing is asked for but its own calls, and those of modules that are in no other's. Where a module
    is made later, all are asked for again.
    """

    def __init__(
        self, replacements: Replacements, ended: Callable[[], None], anew: Callable[[], bool] = lambda: True
    ) -> None:
        self._replacements = replacements
        self._ended, self._anew = ended, anew
        self._kind = 0
        self._leaders: defaultdict[int, _Leader] = defaultdict(_Leader)
        self._sites: defaultdict[tuple[CodeType, int], _Site] = defaultdict(_Site)
        self._user_files = UserFiles()
        self._thread = threading.get_ident()
        self._called: list[Any] = []
        """The modules that are called, outermost first."""
        self._trained: set[int] = set()
        """The parameters that optimizers update, by identity."""
        self._looks, self._rooted = _LOOKS, False
        self._later: Callable[[], Any] = lambda: None
        """The module that was made then, as long as it is alive."""
        self._outermost: list[ref[Any]] = []
        self._models = 0
        """Calls of models that are going on, where only these are asked for."""
        self._derivatives = 0
        """Of the functions that go backward several times, those that are called."""
        self._entered, self._around, self._hooks, self._roots = ExitStack(), ExitStack(), ExitStack(), ExitStack()

    def __enter__(self) -> StepEnds:
        from torch.nn import Module
        from torch.optim import Optimizer

        self._ask_all()
        self._around.enter_context(self._around_derivatives())
        initialise = Optimizer.__init__

        @named_as(initialise)
        def init(optimizer: Any, *arguments: Any, **options: Any) -> None:
            # Derivatives are parts of its steps from here on, and so are calls of the models that it updates.
            self._around.close()
            initialise(optimizer, *arguments, **options)
            self._trained.update(id(parameter) for group in optimizer.param_groups for parameter in group["params"])

        make_module = Module.__init__

        @named_as(make_module)
        def module_init(module: Any, *arguments: Any, **options: Any) -> None:
            make_module(module, *arguments, **options)
            outside = threading.get_ident() == self._thread and not self._models
            if self._looks and self._rooted and self._kind == _MODEL and outside:
                self._looks -= 1
                self._ask_all()
                self._later = ref(module)

        attribute = self._replacements.attribute
        self._entered.enter_context(attribute(Optimizer, "__init__", init))
        self._around.enter_context(attribute(Module, "__init__", module_init))
        self._replacements.after_region = self._region_left
        self._around.callback(setattr, self._replacements, "after_region", None)
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self._entered.close()

    def _ask_all(self) -> None:
        from torch.nn.modules import module

        self._roots.close()
        self._hooks.close()
        self._rooted = False
        hook, entry = object(), self._replacements.entry
        for hooks, value in (
            (module._global_forward_pre_hooks, self._enter_module),
            (module._global_forward_hooks_always_called, True),
            (module._global_forward_hooks, self._leave_module),
        ):
            self._hooks.enter_context(entry(hooks, hook, value))

    def _close(self) -> None:
        for asked in (self._hooks, self._roots, self._around):
            asked.close()

    def optimizer_stepped(self, optimizer: object) -> None:
        self._close()
        if self._leaders[_OPTIMIZER].is_turn_of(optimizer):
            self._end(_OPTIMIZER)

    def _end(self, kind: int) -> None:
        if kind > self._kind:
            if self._kind and not self._anew():
                if self._kind <= _MODEL:
                    # The program does something else now, perhaps by another model.
                    self._ask_all()
                return
            self._kind = kind
            if kind > _MODEL:
                self._hooks.close()
                self._roots.close()
        if kind == self._kind:
            self._ended()

    @contextmanager
    def _around_derivatives(self) -> Iterator[None]:
        import torch

        def ending(function: Callable[..., Any]) -> Callable[..., Any]:
            @named_as(function)
            def call(*arguments: Any, **options: Any) -> Any:
                if threading.get_ident() != self._thread or self._derivatives:
                    return function(*arguments, **options)
                keeps, is_new = _keeps_graph(arguments, options), _is_new_graph(arguments, options)
                result = function(*arguments, **options)
                if is_new:
                    self._derived(_KEPT_GRAPH if keeps else _BACKWARD)
                return result

            return call

        def whole(function: Callable[..., Any]) -> Callable[..., Any]:
            @named_as(function)
            def call(*arguments: Any, **options: Any) -> Any:
                if threading.get_ident() != self._thread or self._derivatives:
                    return function(*arguments, **options)
                self._derivatives += 1
                try:
                    result = function(*arguments, **options)
                finally:
                    self._derivatives -= 1
                self._derived(_KEPT_GRAPH)
                return result

            return call

        functional = torch.autograd.functional
        with ExitStack() as stack:
            for owner, name, wrapped in (
                (torch.autograd, "backward", ending),
                (torch.autograd, "grad", ending),
                (functional, "jacobian", whole),
                (functional, "hessian", whole),
            ):
                stack.enter_context(self._replacements.attribute(owner, name, wrapped(getattr(owner, name))))
            yield

    def _derived(self, kind: int) -> None:
        frame: Any = sys._getframe(2)
        while frame.f_back is not None and not self._user_files[frame.f_code.co_filename]:
            frame = frame.f_back
        if self._leaders[kind].is_turn_of(self._sites[frame.f_code, frame.f_lasti]):
            self._end(kind)

    def _enter_module(self, module: Any, _: Any) -> None:
        if threading.get_ident() == self._thread:
            self._called.append(module)

    def _leave_module(self, module: Any, _: Any, __: Any) -> None:
        if threading.get_ident() != self._thread or not any(module is called for called in self._called):
            return
        # An exception may have skipped the exits of inner modules.
        while self._called.pop() is not module:
            pass
        if not self._called:
            self._model_called(module)

    def _model_called(self, module: Any) -> None:
        parameter, leader = next(module.parameters(), None), self._leaders[_MODEL]
        if parameter is None or id(parameter) in self._trained or self._replacements.in_region:
            return
        if not leader.is_turn_of(module) or leader.turns == 1:
            return
        # Within the step that ends. While an exception is handled PyTorch goes through the hooks, which stay then.
        if leader.turns >= 2 and not self._rooted and sys.exc_info()[1] is None:
            self._ask_roots(module)
        if leader.turns == 2 and self._kind == _MODEL:
            # Another has ended steps until then.
            self._anew()
        self._end(_MODEL)

    def _enter_root(self) -> None:
        if threading.get_ident() == self._thread:
            self._models += 1

    def _leave_root(self, module: Any) -> None:
        if threading.get_ident() == self._thread:
            self._models -= 1
            self._model_called(module)

    def _region_left(self, function: Any) -> None:
        """A region within a call that is seen, or of a program that trains, is a part of a step."""
        inside = self._called or self._models or self._derivatives or threading.get_ident() != self._thread
        if inside or self._trained or not self._leaders[_REGION].is_turn_of(function):
            return
        if self._kind == _MODEL and _is_compiled(self._leaders[_MODEL].now):
            # Its calls are not seen any more.
            self._kind = _REGION
        self._end(_REGION)

    def _ask_roots(self, leader: Any) -> None:
        """No hook any more: the calls of `leader`, and of modules that are in no other's, are asked for in these."""
        from tilewright.pytorch.state import COMPUTES_CALL

        if _is_compiled(leader):
            return
        if not self._outermost or self._later() is not None:
            # It goes through all objects: not for those that a step makes and drops.
            self._outermost = [ref(it) for it in outermost_modules()]
        alive = [it for known in self._outermost if (it := known()) is not None and it is not leader]
        for module in (leader, *alive):
            if next(module.parameters(), None) is not None:
                call = _Call(module, self._enter_root, self._leave_root)
                self._roots.enter_context(self._replacements.own(module, COMPUTES_CALL, call))
        self._hooks.close()
        self._rooted = True


def _is_compiled(module: Any) -> bool:
    """Whether `Module.compile` made what computes its calls."""
    from tilewright.pytorch.state import COMPUTES_CALL

    call = getattr(module, "__dict__", {}).get(COMPUTES_CALL)
    return call is not None and not isinstance(call, _Call)


def _keeps_graph(arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether `backward` or `grad`, so called, leaves the graph for another."""
    given = dict(zip(("", "", "retain_graph", "create_graph"), arguments, strict=False)) | options
    keeps = given.get("retain_graph")
    return bool(given.get("create_graph") if keeps is None else keeps)


def _is_new_graph(arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether nothing went backward through the graph of the first tensor yet: its rows, as y[i], have one graph."""
    tensors = arguments[0] if arguments else options.get("outputs", options.get("tensors"))
    while isinstance(tensors, (tuple, list)) and tensors:
        tensors = tensors[0]
    node = getattr(tensors, "grad_fn", None)
    if node is None:
        return True
    for _ in range(_DEEP):
        inner = [it for it, _ in node.next_functions if it is not None]
        if len(inner) != 1 or not inner[0].next_functions:
            break
        node = inner[0]
    is_new = _GONE_THROUGH not in node.metadata
    node.metadata[_GONE_THROUGH] = True
    return is_new
