"""Ranges around what a compiled program runs on a CPU without an operator of PyTorch's, which no profile would show.

On a GPU every kernel is in the trace by itself, under the name of its region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from tilewright.measure.recording.recorder import Recorder

if TYPE_CHECKING:
    from tilewright.runtime.executable import Slots


@contextmanager
def marked_regions(recorder: Recorder) -> Iterator[None]:
    """While inside, each generated kernel, draw and attention of a CPU that runs while `recorder` records has a range
    of its step's name; so have the regions and launches in the run's tables."""
    from tilewright.runtime.draw import DrawStep
    from tilewright.runtime.executable import CallStep, KernelStep

    with ExitStack() as stack:
        for kind in (KernelStep, DrawStep):
            stack.enter_context(_marked(kind, recorder, lambda _: True))
        stack.enter_context(_marked(CallStep, recorder, lambda step: _is_own(step.target)))
        yield


def _is_own(target: Callable[..., Any]) -> bool:
    """Whether a call is into tilewright; PyTorch's profiler sees its own operators."""
    return isinstance(target, partial) and target.func.__module__.startswith("tilewright.")


@contextmanager
def _marked(kind: type, recorder: Recorder, unseen: Callable[[Any], bool]) -> Iterator[None]:
    bare: Callable[[Any, Slots], None] = kind.run  # type: ignore[attr-defined]

    @wraps(bare)
    def run(step: Any, slots: Slots) -> None:
        if recorder.ranges.on and unseen(step):
            with recorder.ranges.named(step.name):
                bare(step, slots)
        else:
            bare(step, slots)

    kind.run = run  # type: ignore[attr-defined]
    try:
        yield
    finally:
        kind.run = bare  # type: ignore[attr-defined]
