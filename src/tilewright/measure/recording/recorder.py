"""Records some steps of a program with a profiler, after warm-up and within a bound of memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import fmean
from uuid import uuid4

from tilewright.measure.recording.bare_steps import Rush, bare_steps, enough_to_compare
from tilewright.measure.recording.compilation import COMPILING, Replacements, marked_reasons, noticed_compilations
from tilewright.measure.recording.containment import contained
from tilewright.measure.recording.garbage import marked_collections
from tilewright.measure.recording.guard import RecordingGuard
from tilewright.measure.recording.other_profilers import noticed, refuse_second
from tilewright.measure.recording.plan import BYTES_AN_EVENT, DESCRIBED_BY, DESCRIPTION, Recording, RecordingPlan
from tilewright.measure.recording.processor_time import ProcessorClock, ThreadClock
from tilewright.measure.recording.ranges import STEP, Ranges
from tilewright.measure.recording.step_ends import StepEnds
from tilewright.measure.recording.synchronisations import marked_synchronisations
from tilewright.measure.recording.windows import (
    DeviceWindow,
    KinetoWindow,
    NsightWindow,
    RangesWithinWindows,
    Window,
    gpu_in_use,
    has_gpu,
)
from tilewright.records.errors import UsageError, warn_once

_started: list[Recorder] = []
"""Between their start and stop; only the last one may record."""


class Recorder:
    """Records the program between `start` and `stop`, by a plan.

    A call of `step` ends a step. With `by_optimizer`, and until the first call of `step`, the end of an
    optimizer's step does so, and with `by_calls` what else `StepEnds` finds. The trace is `<name>.json` in `folder`.
    `kept` is called when the recording is complete, which is often long before `stop`.
    """

    def __init__(
        self, plan: RecordingPlan, folder: Path, *, name: str = "trace", by_optimizer: bool = False,
        by_calls: bool = False, kept: Callable[[Recording], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.recording = Recording(plan)
        self._plan = plan
        self._path = folder / f"{name}.json"
        self._described = folder / f"{name}.described.json"
        self._label, self._kept = uuid4().hex, kept
        self._by_optimizer, self._by_calls = by_optimizer, by_calls
        self._schedule = self._follow_plan()
        self._keeps = False
        """Whether the steps that are recorded are those to keep; the warm-up comes first."""
        self.done = False
        """Whether the recording is complete."""
        # Nsight Systems holds its events in another process.
        self._most_bytes = float("inf") if plan.nvtx else plan.events * BYTES_AN_EVENT
        self._replacements = Replacements()
        self._step_ends = StepEnds(self._replacements, self._program_step_ended, self._count_anew)
        self.ranges = Ranges(self._replacements, layers=plan.layers, after_step=self._step_ends.optimizer_stepped)
        self._marked = ExitStack()
        self._hooks = ExitStack()
        self._within_windows = RangesWithinWindows(self._replacements)
        self._guard = RecordingGuard(self._on_limit)
        self._window: Window | None = None
        self._close_step: Callable[[], None] | None = None
        self._ends_in_step = False
        self._whole_seconds = self._steps_begin = 0.0
        """From the begin of the first step that is kept to the end of the last whole one."""
        self._paused, self._bare_us = False, list[float]()
        self._began = self._warm_paused = self._step_seconds = self._compiled_seconds = 0.0

    def start(self) -> None:
        """Begin the plan; a recorder that runs already gives way.

        Raises UsageError for NVTX ranges without a GPU, and if a profiler of PyTorch's runs.
        """
        if self._plan.nvtx and not has_gpu():
            raise UsageError("NVTX ranges need Nsight Systems and a GPU, and PyTorch finds no GPU")
        if _started:
            _started[-1]._give_way()
        refuse_second()
        self._began = time.perf_counter()
        self._begin()

    @contained
    def _begin(self) -> None:
        self._hooks.enter_context(self._replacements)
        self._hooks.enter_context(noticed_compilations(self._compilation))
        self._hooks.enter_context(noticed(self._give_way))
        _started.append(self)
        self._hooks.callback(_started.remove, self)
        self.ranges.__enter__()
        if self._by_calls:
            self._hooks.enter_context(self._step_ends)
        self._within_windows.__enter__()
        with self._guard_paused():
            next(self._schedule)

    @contained
    def step(self) -> None:
        """Mark the end of a step and the beginning of the next."""
        first, self._by_optimizer = self._by_optimizer, False
        if first and self.recording.steps_seen:
            self._join_steps()
        else:
            self._step_ended()

    def _join_steps(self) -> None:
        """The optimizer's steps until the first call of `step` were that step, or parts of it.

        One remains as it is. Several are no steps of the recording.
        """
        if self._keeps and self.recording.steps_kept > 1:
            self._forget_steps(time.perf_counter())

    def _forget_steps(self, began: float) -> None:
        """Those that have ended; the one that began then stays."""
        if self._window is not None:
            self._window.drop(STEP)
        self.recording.steps_kept, self.recording.recorded_thread_us, self.recording.recorded_queued_us = 0, [], []
        self._steps_begin, self._ends_in_step = began, True

    def stop(self) -> Recording:
        """End the recording if it has not ended, and remove all hooks. Call it once."""
        self._end()
        # Also where that failed.
        for end in (self._guard.rest, self._within_windows.__exit__, self.ranges.__exit__, self._hooks.close):
            with suppress(Exception):
                end()
        self.recording.seconds = time.perf_counter() - self._began
        return self.recording

    @contained
    def _end(self) -> None:
        with self._guard_paused():
            if not self.done:
                self._drop_part_of_step()
                self._finish()

    def give_up(self, error: Exception) -> None:
        """End the recording because the recorder fails; keep what was recorded, if that can be."""
        reason = str(error).strip().partition("\n")[0]
        self.recording.failed = self.recording.failed or f"{type(error).__name__}: {reason}"
        warn_once(f"the recording ends here, since the recorder failed; please report {self.recording.failed}")
        for end in (self._guard.rest, self._marked.close, self.ranges.stop, self._drop_part_of_step, self._finish):
            if not self.done:
                with suppress(Exception):
                    end()
        self.done = True
        if self._keeps and self._path.exists():
            self.recording.trace = self._path

    def forget(self) -> None:
        """Record nothing more, and write nothing, in a child of a fork, which has a copy of all this."""
        self.done = True
        self._guard.forget()
        self._replacements.forget()
        if self._window is not None:
            self._window.forget()
            self._window = None

    @contextmanager
    def _guard_paused(self) -> Iterator[None]:
        """Keep the guard from interrupting while a window is opened or closed."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @contextmanager
    def _compilation(self) -> Iterator[None]:
        """Around a compilation, which is timed, and not recorded."""
        began, step, window = time.perf_counter(), self.recording.steps_seen, self._window
        with ExitStack() as around:
            around.enter_context(self._replacements.while_compiling())
            around.enter_context(self._guard.excused())
            if window is not None:
                around.callback(window.mark(COMPILING))
                around.enter_context(window.paused())
            yield
        seconds = time.perf_counter() - began
        self._compiled_seconds += seconds
        if self._keeps and window is not None and not self.done:
            self.recording.compiling_seconds += seconds
            if step not in self.recording.compiled_in:
                self.recording.compiled_in.append(step)

    @contained
    def _program_step_ended(self) -> None:
        if self._by_optimizer:
            self._step_ended()

    def _count_anew(self) -> bool:
        """Only before anything is recorded."""
        if self._window is not None or self._keeps or self.recording.step_events:
            return False
        self.recording.steps_seen, self._bare_us, self._schedule = 0, [], self._follow_plan()
        with self._guard_paused():
            next(self._schedule)
        return True

    def _step_ended(self) -> None:
        self.recording.steps_seen += 1
        if not self.done:
            with self._guard_paused():
                next(self._schedule, None)

    def _follow_plan(self) -> Iterator[None]:
        """The plan from begin to end; it is resumed at the end of each step."""
        if not self._plan.whole and self._plan.wait:
            yield from self._wait()
        if not self._plan.whole and self._plan.warmup:
            yield from self._warm_up()
            # One step without a profiler, so that ranges begun under this profiler end before the next one starts.
            yield
            if self.recording.description:
                self._open(lambda: DeviceWindow(self._path, {DESCRIBED_BY: self._label}))
                yield
        yield from self._keep()

    def _wait(self) -> Iterator[None]:
        self._guard.learn()
        yield
        self._guard.rest()  # Its polling would be timed too.
        timed, clock = self._bare_us, ProcessorClock()
        yield from bare_steps(timed, lambda steps, _: steps == self._plan.wait - 1, lambda: self._compiled_seconds)
        if timed:
            self.recording.bare_us, self.recording.processors = fmean(timed), clock.taken(len(timed))

    def _warm_up(self) -> Iterator[None]:
        began, steps = time.perf_counter(), self._plan.warmup
        self._open(lambda: KinetoWindow(self._plan, self._described, {DESCRIPTION: self._label}))
        self._guard.watch(nbytes=self._most_bytes)
        self._begin_step_range()
        for _ in range(steps - 1):
            yield
            self._next_step_range()
        yield
        self._count_warmup()
        seconds = time.perf_counter() - began - self._warm_paused
        events, counted_seconds = self.recording.events, self.recording.seconds_kept
        if self.recording.cut:
            events = round(events / counted_seconds * max(seconds, counted_seconds))
        self.recording.step_events = events // steps
        self._step_seconds = seconds / steps
        self.recording.events, self.recording.seconds_kept, self.recording.cut = 0, 0.0, False

    def _count_warmup(self) -> None:
        began = time.perf_counter()
        self._close()
        if self._plan.light and not self._plan.nvtx and not self.recording.cut and gpu_in_use():
            self.recording.description = self._described
        else:
            self._described.unlink(missing_ok=True)
        self._warm_paused += time.perf_counter() - began

    def _keep(self) -> Iterator[None]:
        """Record the steps to keep."""
        self._keeps = True
        each, most = self.recording.step_events, self._plan.events
        wanted = max(1, min(self._plan.active, most // each)) if each else self._plan.active
        if isinstance(self._window, DeviceWindow):
            self._window.settled()
        else:
            self._open(lambda: KinetoWindow(self._plan, self._path))
        if not each:
            self._guard.watch(nbytes=self._most_bytes)
        elif each > most:
            self._guard.watch(seconds=self._step_seconds * most / each)
        self._begin_step_range()
        self._steps_begin, clock, rush = time.perf_counter(), ThreadClock(), Rush(self._bare_us)
        rushed = max(wanted, min(Rush.MOST, most // each)) if each else wanted
        while True:
            yield
            if rush.is_over():
                self._forget_steps(rush.began)
            self.recording.steps_kept += 1
            self._whole_seconds = time.perf_counter() - self._steps_begin
            clock.lap(self.recording.recorded_thread_us, self.recording.recorded_queued_us)
            if not self._plan.whole and self.recording.steps_kept >= (rushed if rush.lasts else wanted):
                break
            self._next_step_range()
        self._close_kept()
        if not self._plan.nvtx and not self._plan.whole:
            enough, clock = enough_to_compare(self._plan.timed), ThreadClock()
            yield from bare_steps(self.recording.timed_us, enough, lambda: self._compiled_seconds)
            clock.lap([], queued := list[float]())
            self.recording.timed_queued_us = sum(queued) if queued else None
        self._finish()

    @contained
    def _give_way(self) -> None:
        """End the recording, because the program starts a profiler of its own."""
        if self.done:
            return
        if self.recording.trace and self._window is None:
            # Steps were being timed.
            return self._finish()
        with self._guard_paused():
            self.recording.gave_way = True
            warn_once("the program starts a profiler of its own; this recording gives way to it and ends here")
            self._drop_part_of_step()
            self._finish()

    @contained
    def _on_limit(self) -> None:
        """End the recording at the guard's limit."""
        if self._paused or self._window is None:
            return
        with self._guard_paused():
            self.recording.cut = True
            if self._keeps:
                self._drop_part_of_step()
                self._finish()
            else:
                self._count_warmup()

    def _open(self, make: Callable[[], Window]) -> None:
        """Record by the window that `make` gives, or by Nsight Systems if that is asked for."""
        self._window = NsightWindow() if self._plan.nvtx else make()
        self._window.start()
        self._within_windows.opened()
        self._marked.enter_context(marked_synchronisations(self._window.mark, self._replacements))
        self._marked.enter_context(marked_collections(self._window.mark, self._replacements))
        self._marked.enter_context(marked_reasons(self._window.mark))
        self.ranges.start(self._window.mark, self._window.new_log, modules=not self._window.finds_modules)

    def _close(self) -> None:
        self._guard.rest()
        if self._window is None:
            return
        self._end_step_range()
        self._marked.close()
        self.ranges.stop()
        window, self._window = self._window, None
        self._within_windows.closed()
        result = window.stop()
        self.recording.events = result.events
        self.recording.seconds_kept = result.seconds
        self.recording.lines_ended_early = result.lines_ended_early

    def _begin_step_range(self) -> None:
        assert self._window, "a window is open"
        self._close_step = self._window.mark(f"{STEP}{self.recording.steps_seen}")

    def _next_step_range(self) -> None:
        """Nothing where the limit has closed the window."""
        if self._window is not None:
            self._end_step_range()
            self._begin_step_range()

    def _end_step_range(self) -> None:
        if self._close_step:
            self._close_step()
            self._close_step = None

    def _drop_part_of_step(self) -> None:
        """Leave the step that the recording's end cuts without a range if there are whole ones: totals are divided by
        the number of steps."""
        if self._keeps and self.recording.steps_kept and not self._plan.nvtx:
            self._close_step = None
            self._ends_in_step = True

    def _close_kept(self) -> None:
        self._close()
        if self._keeps and self.recording.trace is None:
            self.recording.trace = self._path if self._path.exists() else None
            if self.recording.steps_kept and not self.recording.cut:
                seconds = self._whole_seconds if self._ends_in_step else self.recording.seconds_kept
                seconds = max(0.0, seconds - self.recording.compiling_seconds)
                self.recording.recorded_us = seconds / self.recording.steps_kept * 1e6

    def _finish(self) -> None:
        self._close_kept()
        if not self.recording.trace:
            self.recording.description = None
            for path in (self._path, self._described):
                path.unlink(missing_ok=True)
        self.done = True
        self.recording.beside = self._guard.beside
        self.recording.seconds = time.perf_counter() - self._began
        self._kept(self.recording)


def _forked() -> None:
    for recorder in _started:
        recorder.forget()
    _started.clear()


os.register_at_fork(after_in_child=_forked)
