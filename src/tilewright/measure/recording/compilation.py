"""Keeps recording and compilation apart: the compiler sees nothing of the recorder's, and its work is not recorded.

Dynamo reads the bytecode of all that runs in a compiled region, guards on the hooks that it finds there, and ends the
graph, or the program, at what it does not understand. So in a compiled region PyTorch is as if nothing recorded it:
each hook and replaced function is taken back when a thread enters the first such region, and put back after the last.

A compilation makes millions of calls, which would fill the recording. While a thread compiles, its calls, lines and
operators are not recorded; one range shows the time.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from types import FrameType, ModuleType
from typing import Any, TypeVar
from weakref import ref

from tilewright.measure.recording.line_tracer import is_of_pytorch, traced_by_another

COMPILING = "compilation"
"""Name of the range around each compilation."""
RECOMPILED = "compiled again: "
"""Prefix of a mark, followed by PyTorch's reason, in its words."""
_TRIGGERS = ("DYNAMO", "LAZY_BACKWARD")
"""What begins a compilation. PyTorch also names the recording of CUDA graphs and autotuning, which run kernels."""


F = TypeVar("F", bound=Callable[..., Any])


def named_as(replaced: Callable[..., Any]) -> Callable[[F], F]:
    """As `wraps`, and stacks show that name too."""

    def named(function: F) -> F:
        function.__code__ = function.__code__.replace(co_name=replaced.__name__)
        return wraps(replaced)(function)  # type: ignore[return-value]

    return named


class Replacements:
    """Hooks and replaced functions in PyTorch's modules, there only while no thread is in a compiled region.

    The modules are shared: while one thread is in a compiled region, the others have no hooks either. `after_region` is
    called with the callback of each outermost call of a compiled function that ends, on its thread.
    """

    def __init__(self) -> None:
        self.after_region: Callable[[Any], None] | None = None
        self._made: list[_Attribute | _Entry | _Own | _Listed] = []
        self._inside: set[int] = set()
        self._compiling: set[int] = set()
        self._hidden = False
        self.held = threading.RLock()
        """While a thread holds it, no other enters or leaves a compiled region. Reentrant: the guard's pending call may
        run in the middle of any of these methods."""
        self._installed = ExitStack()
        self._outermost = _OutermostRegion()

    def __enter__(self) -> Replacements:
        self._installed.enter_context(once_imported("torch._dynamo", self._follow_regions))
        return self

    @property
    def in_region(self) -> bool:
        """Whether this thread is within a call of a compiled function, also in what is not compiled there."""
        return self._outermost.frame is not None

    def _follow_regions(self) -> None:
        from tilewright.pytorch.compiler import frame_conversion, region_switch

        set_bare: Callable[[Any], Any] = getattr(*region_switch())
        convert_bare: Callable[..., Any] = getattr(*frame_conversion())
        outermost = self._outermost

        @wraps(set_bare)
        def set_eval_frame(callback: Any) -> Any:
            if callback is not None:
                # What a region calls may be none, with others within: it is left where it was entered.
                if outermost.frame is None and (caller := sys._getframe(1)).f_code.co_name != "__enter__":
                    outermost.frame, outermost.callback = caller, callback
                self._change(self._inside.add)
                return set_bare(callback)
            result = set_bare(callback)
            # An optimizer comes here in each step, in programs that compile nothing too.
            if self._inside:
                self._change(self._inside.discard)
            if outermost.frame is sys._getframe(1):
                left, outermost.frame, outermost.callback = outermost.callback, None, None
                if self.after_region is not None:
                    self.after_region(left)
            return result

        @wraps(convert_bare)
        def convert(*arguments: Any) -> Any:
            with self.while_compiling():
                return convert_bare(*arguments)

        for made in (
            _Attribute(*region_switch(), set_eval_frame),
            _Attribute(*frame_conversion(), convert),
        ):
            made.put()
            self._installed.callback(made.take_back)

    def __exit__(self, *_: object) -> None:
        self._installed.close()

    @contextmanager
    def attribute(self, owner: Any, name: str, replacement: Any) -> Iterator[None]:
        """While inside, `owner.name` is `replacement`."""
        with self._standing(_Attribute(owner, name, replacement)):
            yield

    @contextmanager
    def entry(self, mapping: MutableMapping[Any, Any], key: object, value: Any) -> Iterator[None]:
        """While inside, `mapping[key]` is `value`; PyTorch keeps hooks so, under keys of their own."""
        with self._standing(_Entry(mapping, key, value)):
            yield

    @contextmanager
    def own(self, owner: Any, name: str, value: Any) -> Iterator[None]:
        """While inside, `owner`, as long as it lives, has `value` as an attribute of its own, which it has not yet."""
        with self._standing(_Own(owner, name, value)):
            yield

    @contextmanager
    def listed(self, values: list[Any], value: Any) -> Iterator[None]:
        """While inside, `value` is the last of `values`, or among those that are added later."""
        with self._standing(_Listed(values, value)):
            yield

    @contextmanager
    def while_compiling(self) -> Iterator[None]:
        """While inside, this thread is as in a compiled region; afterwards it is, or is not, in one as before."""
        thread = threading.get_ident()
        if thread in self._compiling:
            yield
            return
        before = self._inside.add if thread in self._inside else self._inside.discard
        self._change(self._compiling.add)
        try:
            yield
        finally:
            self._change(before)
            self._change(self._compiling.discard)

    def forget(self) -> None:
        """Take all back for good, in a forked child, where the threads that held the lock do not exist."""
        self.held = threading.RLock()
        self._inside.clear()
        self._compiling.clear()
        for made in self._made:
            made.take_back()
        self._made.clear()
        self._installed.close()

    @contextmanager
    def _standing(self, made: _Attribute | _Entry | _Own | _Listed) -> Iterator[None]:
        with self.held:
            self._made.append(made)
            if not self._hidden:
                made.put()
        try:
            yield
        finally:
            with self.held:
                if made in self._made:
                    self._made.remove(made)
                made.take_back()

    def _change(self, thread_set: Callable[[int], None]) -> None:
        """Add this thread to one of the sets, or remove it; then show or hide."""
        with self.held:
            thread_set(threading.get_ident())
            hidden = bool(self._inside or self._compiling)
            if hidden is self._hidden:
                return
            self._hidden = hidden
            for made in tuple(self._made):
                if hidden:
                    made.take_back()
                else:
                    made.put()


class _OutermostRegion(threading.local):
    """The frame that entered the outermost compiled region of a thread, and the region's callback."""

    frame: FrameType | None = None
    callback: Any = None


@contextmanager
def once_imported(
    name: str, then: Callable[[], None], around: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[None]:
    """Call `then` now if the module is imported; if it is imported while inside, within `around`, right after that."""
    if getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", True) is False:
        then()
        yield
        return
    waiting = _Awaited(name, then, around)
    sys.meta_path.insert(0, waiting)
    try:
        yield
    finally:
        if waiting in sys.meta_path:
            sys.meta_path.remove(waiting)


class _Awaited(importlib.abc.MetaPathFinder):
    """Finds a module as the others do, runs it within a context, and calls a function once it has run."""

    def __init__(self, name: str, then: Callable[[], None], around: Callable[[], AbstractContextManager[None]]) -> None:
        self._name, self._then, self._around = name, then, around

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        if found is None or found.loader is None:
            return found
        execute = found.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with self._around():
                execute(module)
            self._then()

        found.loader.exec_module = exec_module  # type: ignore[method-assign]
        return found


class _Attribute:
    """Leaves alone an attribute that the program replaces meanwhile."""

    def __init__(self, owner: Any, name: str, replacement: Any) -> None:
        self._owner, self._name, self._replacement = owner, name, replacement
        self._before = getattr(owner, name)

    # By equality: each look at a method makes another object.
    def put(self) -> None:
        if getattr(self._owner, self._name) == self._before:
            setattr(self._owner, self._name, self._replacement)

    def take_back(self) -> None:
        if getattr(self._owner, self._name) == self._replacement:
            setattr(self._owner, self._name, self._before)


class _Entry:
    def __init__(self, mapping: MutableMapping[Any, Any], key: object, value: Any) -> None:
        self._mapping, self._key, self._value = mapping, key, value

    def put(self) -> None:
        self._mapping[self._key] = self._value

    def take_back(self) -> None:
        self._mapping.pop(self._key, None)


class _Own:
    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self._owner, self._name, self._value = ref(owner), name, value

    def put(self) -> None:
        if (owner := self._owner()) is not None:
            vars(owner).setdefault(self._name, self._value)

    def take_back(self) -> None:
        if (owner := self._owner()) is not None and vars(owner).get(self._name) is self._value:
            del vars(owner)[self._name]


class _Listed:
    def __init__(self, values: list[Any], value: Any) -> None:
        self._values, self._value = values, value

    def put(self) -> None:
        self._values.append(self._value)

    def take_back(self) -> None:
        if self._value in self._values:
            self._values.remove(self._value)


@contextmanager
def noticed_compilations(around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """While inside, the outermost compilation of each thread runs within the context that `around` gives, and so does
    the import of the compiler, which makes as many calls.

    PyTorch's own callbacks would be called by the first thread that compiles and the last one that ends.
    """
    thread = threading.local()

    @contextmanager
    def outermost() -> Iterator[None]:
        with ExitStack() as stack:
            if not getattr(thread, "compiles", False):
                thread.compiles = True
                stack.callback(setattr, thread, "compiles", False)
                stack.enter_context(around())
            yield

    def replace() -> None:
        from tilewright.pytorch.compiler import compilation_callbacks

        install = getattr(*compilation_callbacks())

        @wraps(install)
        @contextmanager
        def install_callbacks(trigger: Any, compile_id: str) -> Iterator[None]:
            with ExitStack() as stack:
                if trigger.name in _TRIGGERS:
                    stack.enter_context(outermost())
                stack.enter_context(install(trigger, compile_id))
                yield

        made = _Attribute(*compilation_callbacks(), install_callbacks)
        made.put()
        installed.callback(made.take_back)

    with ExitStack() as installed:
        installed.enter_context(once_imported("torch._dynamo", replace, outermost))
        # Which imports Dynamo.
        installed.enter_context(once_imported("torch._inductor", lambda: None, outermost))
        yield


@contextmanager
def marked_reasons(mark: Callable[[str], Callable[[], None]]) -> Iterator[None]:
    """At its end a mark with the reason of the last compilation in between that replaced an earlier one."""
    from tilewright.pytorch.compiler import recompile_reasons

    began = time.time()
    yield
    for reason in recompile_reasons(began)[-1:]:
        # It names the earlier compilation: "0/7: tensor ...".
        mark(RECOMPILED + (reason.partition(": ")[2] or reason))()


@contextmanager
def unrecorded_thread() -> Iterator[None]:
    """While inside, the calls, lines and operators of this thread are not recorded.

    Where another tracer or profiler of Python's follows the thread, such as coverage, calls are recorded: Python
    stops and resumes all of them together.
    """
    from tilewright.pytorch.state import record_operators

    state = None if traced_by_another() else ctypes.pythonapi.PyThreadState_Get()
    record_operators(False)
    # Between these two calls in this function: PyTorch's profiler pairs calls with returns by their number.
    if state:
        _suspend(state)
    try:
        yield
    finally:
        if state:
            _resume(state)
        record_operators(True)


def forget_this_thread() -> None:
    """Record no calls and operators of this thread any more, without ending the profiler."""
    from tilewright.pytorch.state import record_operators

    record_operators(False)
    if is_of_pytorch(sys.getprofile()):
        sys.setprofile(None)


ctypes.pythonapi.PyThreadState_Get.restype = ctypes.c_void_p
_suspend, _resume = ctypes.pythonapi.PyThreadState_EnterTracing, ctypes.pythonapi.PyThreadState_LeaveTracing
for _function in (_suspend, _resume):
    _function.argtypes, _function.restype = [ctypes.c_void_p], None
