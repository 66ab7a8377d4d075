"""What the compilations of a block give to whoever records them, in a module that imports neither PyTorch nor the
backend: a program under the recorder that compiles nothing pays for no compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tilewright.records.program import Decision, Fallback

if TYPE_CHECKING:
    from tilewright.compile.plan import GraphPlan
    from tilewright.runtime.executable import Executable


@dataclass
class CompiledGraph:
    """One graph of a plan, and what runs it."""

    plan: GraphPlan
    executable: Executable


@dataclass
class Recording:
    """The results of compilations inside `recording()`."""

    graphs: list[CompiledGraph] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)


_current: ContextVar[Recording | None] = ContextVar("tilewright_recording", default=None)
_waiting: list[Callable[[], object]] = []


@contextmanager
def recording() -> Iterator[Recording]:
    """Collect all graphs, decisions and fallbacks of compilations in this block."""
    record = Recording()
    token = _current.set(record)
    try:
        yield record
    finally:
        _current.reset(token)


def current_recording() -> Recording | None:
    """The recording of the innermost block that this compilation is in."""
    return _current.get()


@contextmanager
def before_next_compilation(call: Callable[[], object]) -> Iterator[None]:
    """Inside, `call` is called once, before the next compilation, in whichever thread that is."""
    _waiting.append(call)
    try:
        yield
    finally:
        if call in _waiting:
            _waiting.remove(call)


def compilation_begins() -> None:
    """Call what waits for the next compilation."""
    while _waiting:
        _waiting.pop()()
