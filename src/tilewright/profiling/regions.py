"""Ranges around the CPU kernels of a compiled program, which PyTorch's profiler would not record.

On a GPU every kernel is in the trace anyway, under the name of its region.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from tilewright.compile.recording import before_next_compilation
from tilewright.measure.recording.recorder import Recorder

if TYPE_CHECKING:
    from tilewright.runtime.executable import Slots


@contextmanager
def marked_regions(recorder: Recorder) -> Iterator[None]:
    """While inside and while `recorder` records, each generated kernel, draw and attention on a CPU has a range with
    its step's name, which is also the name in the run's tables."""
    with ExitStack() as stack:

        def mark() -> None:
            from tilewright.runtime.draw import DrawStep
            from tilewright.runtime.executable import CallStep, KernelStep

            for kind in (KernelStep, DrawStep):
                stack.enter_context(_marked(kind, recorder, lambda _: True))
            stack.enter_context(_marked(CallStep, recorder, lambda step: _is_tilewright(step.target)))

        # Importing the steps takes as long as importing PyTorch, and a program may compile nothing.
        if "tilewright.runtime.executable" in sys.modules:
            mark()
        else:
            stack.enter_context(before_next_compilation(mark))
        yield


def _is_tilewright(target: Callable[..., Any]) -> bool:
    """Whether a call is into tilewright; PyTorch's profiler records PyTorch's operators."""
    return isinstance(target, partial) and target.func.__module__.startswith("tilewright.")


@contextmanager
def _marked(kind: type, recorder: Recorder, needs_range: Callable[[Any], bool]) -> Iterator[None]:
    bare: Callable[[Any, Slots], None] = kind.run  # type: ignore[attr-defined]

    @wraps(bare)
    def run(step: Any, slots: Slots) -> None:
        if recorder.ranges.on and needs_range(step):
            with recorder.ranges.named(step.name):
                bare(step, slots)
        else:
            bare(step, slots)

    kind.run = run  # type: ignore[attr-defined]
    try:
        yield
    finally:
        kind.run = bare  # type: ignore[attr-defined]
