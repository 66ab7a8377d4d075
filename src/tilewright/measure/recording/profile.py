"""A recording: some steps of a program under a profiler, after warm-up and within a bound of memory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from uuid import uuid4

from tilewright.measure.recording.guard import Guard
from tilewright.measure.recording.ranges import STEP, Marker, Ranges, nvtx, recorded
from tilewright.measure.recording.synchronisations import marked_synchronisations
from tilewright.measure.recording.windows import (
    Detail,
    DeviceWindow,
    KeptApart,
    KinetoWindow,
    NsightWindow,
    Window,
    gpu_at_work,
    has_gpu,
    synchronize,
)
from tilewright.records.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Kineto holds about 350 bytes an event while it records (640 with shapes and no stacks), and up to
# 5.6 kB while it writes them out: 200,000 events are 1.1 GB at the most.
_BYTES_AN_EVENT = 350

DESCRIPTION, DESCRIBED_BY = "tilewright description", "tilewright described by"
"""In the header of two traces, with the same value: steps in every detail, and the light steps that they describe."""


@dataclass(frozen=True)
class Plan:
    """The steps of a recording, in this order, and what is recorded of them.

    `wait` steps run bare, and all but the first are timed; `warmup` steps are recorded to count their
    events; one more runs bare; up to `active` steps are kept. `events` bounds what is recorded in one
    process: fewer steps are kept where they would exceed it, and where one step does, its beginning. With
    `whole` there are no steps to wait for: recording starts at once, up to the bound.

    To record every operator of the host may double the time of a step that launches many kernels. So where
    a GPU is at work, `light` records of the kept steps only the device, the calls into CUDA and the ranges,
    after one more in which the profiler settles, and keeps the last warm-up step as their description.
    Otherwise the warm-up is thrown away.
    """

    wait: int = 5
    warmup: int = 2
    active: int = 3
    events: int = 200_000
    detail: Detail = field(default_factory=Detail)
    layers: bool = True
    whole: bool = False
    nvtx: bool = False
    light: bool = True

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        values = json.loads(text)
        return Plan(**values | {"detail": Detail(**values["detail"])})


@dataclass
class Recording:
    """What was recorded of one process. Times are seconds, and of a step microseconds on the wall clock."""

    plan: Plan
    trace: Path | None = None
    """None where nothing was kept: the program ended too early, or Nsight Systems records."""
    description: Path | None = None
    """The trace of a step in every detail, where those of `trace` are light."""
    events: int = 0
    steps_seen: int = 0
    """Steps that ended while the recorder was there, recorded or not."""
    steps_kept: int = 0
    """Whole steps in the trace; 0 where it holds a part of one, or a program without steps."""
    step_events: int = 0
    """Events of one step, as counted in the warm-up; where its recording was cut short, an estimate."""
    seconds_kept: float = 0.0
    seconds: float = 0.0
    """From the recorder's start to its stop."""
    bare_us: float | None = None
    recorded_us: float | None = None
    cut: bool = False
    """The bound was reached in the middle of a step, or of what is recorded whole."""

    def as_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @staticmethod
    def from_json(text: str) -> Recording:
        values = json.loads(text)
        plan = Plan.from_json(json.dumps(values["plan"]))
        paths = {name: Path(values[name]) if values[name] else None for name in ("trace", "description")}
        return Recording(**values | {"plan": plan} | paths)


_State = Literal["wait", "warmup", "between", "settle", "active", "done"]


class Recorder:
    """Records what runs between `start` and `stop`, by a plan.

    A step ends where `step` is called, or, with `by_optimizer` and until somebody calls it, where an
    optimizer's step ends. The trace goes to `folder` as `<name>.json`. `kept` is called once nothing more
    will be recorded, and that is often long before `stop`.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        name: str = "trace",
        by_optimizer: bool = False,
        kept: Callable[[Recording], None] = lambda _: None,
    ) -> None:
        self.recording = Recording(plan)
        self._plan = plan
        self._path = folder / f"{name}.json"
        self._described = folder / f"{name}.described.json"
        self._label = uuid4().hex
        self._kept = kept
        self._by_optimizer = by_optimizer
        self._state: _State = "wait"
        self._steps_in_state = 0
        self._wanted = plan.active
        # Nsight Systems holds its events elsewhere.
        self._most_bytes = float("inf") if plan.nvtx else plan.events * _BYTES_AN_EVENT
        self._mark: Marker = nvtx if plan.nvtx else recorded
        self.ranges = Ranges(lambda name: self._mark(name), layers=plan.layers, after_step=self._after_optimizer)
        self._marked = ExitStack()
        self._apart = KeptApart()
        self._guard = Guard(self._full)
        self._window: Window | None = None
        self._close_step: Callable[[], None] | None = None
        self._working = False
        self._began = self._timed_from = self._warm_from = self._warm_paused = self._step_seconds = 0.0

    @property
    def done(self) -> bool:
        """Whether nothing more will be recorded."""
        return self._state == "done"

    def start(self) -> None:
        """Raises UsageError where ranges are for Nsight Systems and there is no GPU for it to look at."""
        if self._plan.nvtx and not has_gpu():
            raise UsageError("NVTX ranges are for Nsight Systems and a GPU, and PyTorch sees none here")
        self._began = time.perf_counter()
        self.ranges.on = False
        self.ranges.__enter__()
        self._apart.__enter__()
        with self._at_work():
            self._enter("active" if self._plan.whole else "wait")

    def step(self) -> None:
        """A step ended, and the next begins."""
        self._by_optimizer = False
        self._step_ended()

    def stop(self) -> Recording:
        """End the recording, if it has not ended, and take every range off again; once."""
        with self._at_work():
            if not self.done:
                self._finish()
        self._guard.close()
        self._apart.__exit__()
        self.ranges.__exit__()
        self.recording.seconds = time.perf_counter() - self._began
        return self.recording

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """The guard interrupts at any point; not while a window is opened or closed."""
        self._working = True
        try:
            yield
        finally:
            self._working = False

    def _after_optimizer(self) -> None:
        if self._by_optimizer:
            self._step_ended()

    def _step_ended(self) -> None:
        self.recording.steps_seen += 1
        self._steps_in_state += 1
        if self.done:
            return
        with self._at_work():
            match self._state:
                case "wait":
                    self._waited()
                case "warmup":
                    self._warmed_up()
                case "between":
                    self._enter("settle" if self.recording.description else "active")
                case "settle":
                    self._enter("active")
                case "active":
                    self._kept_one()

    def _enter(self, state: _State) -> None:
        """Go on to `state`, past those that the plan leaves out."""
        self._state, self._steps_in_state = state, 0
        if state == "wait" and not self._plan.wait:
            self._enter("warmup")
        elif state == "wait":
            self._guard.learn()
        elif state == "warmup" and not self._plan.warmup:
            self._enter("active")
        elif state == "warmup":
            self._warm_from, self._warm_paused = time.perf_counter(), 0.0
            self._open()
            self._guard.watch(nbytes=self._most_bytes)
        elif state == "settle":
            self._open()
        elif state == "active":
            self._begin_active()

    def _waited(self) -> None:
        # Only around all that is timed, as in a recording: between two steps the host may run ahead.
        if self._steps_in_state == 1:
            # To ask for the memory takes time too.
            self._guard.rest()
            synchronize()
            self._timed_from = time.perf_counter()
        if self._steps_in_state >= self._plan.wait:
            if self._plan.wait > 1:
                synchronize()
                seconds = time.perf_counter() - self._timed_from
                self.recording.bare_us = seconds / (self._plan.wait - 1) * 1e6
            self._enter("warmup")

    def _warmed_up(self) -> None:
        if self._steps_in_state < self._plan.warmup:
            if self._window is not None:
                self._end_step_range()
                self._begin_step_range()
            return
        self._count_warmup()
        seconds = time.perf_counter() - self._warm_from - self._warm_paused
        events, counted_seconds = self.recording.events, self.recording.seconds_kept
        if self.recording.cut:
            events = round(events / counted_seconds * max(seconds, counted_seconds))
        self.recording.step_events = events // self._plan.warmup
        self._step_seconds = seconds / self._plan.warmup
        self.recording.events, self.recording.seconds_kept, self.recording.cut = 0, 0.0, False
        # A step without a profiler, so that what began under the last one has ended before the next.
        self._enter("between")

    def _count_warmup(self) -> None:
        began = time.perf_counter()
        self._close()
        if self._plan.light and not self._plan.nvtx and not self.recording.cut and gpu_at_work():
            self.recording.description = self._described
        else:
            self._described.unlink(missing_ok=True)
        self._warm_paused += time.perf_counter() - began

    def _begin_active(self) -> None:
        each = self.recording.step_events
        if each:
            self._wanted = max(1, min(self._plan.active, self._plan.events // each))
        if isinstance(self._window, DeviceWindow):
            self._window.settled()
            self._begin_step_range()
        else:
            self._open()
        if not each:
            self._guard.watch(nbytes=self._most_bytes)
        elif each > self._plan.events:
            self._guard.watch(seconds=self._step_seconds * self._plan.events / each)

    def _kept_one(self) -> None:
        self.recording.steps_kept += 1
        if not self._plan.whole and self._steps_in_state >= self._wanted:
            self._finish()
        else:
            self._end_step_range()
            self._begin_step_range()

    def _full(self) -> None:
        """The guard's word: what is recorded by now is all there will be."""
        if self._working or self._window is None:
            return
        with self._at_work():
            self.recording.cut = True
            if self._state == "warmup":
                self._count_warmup()
            else:
                self._finish()

    def _open(self) -> None:
        if self._plan.nvtx:
            self._window = NsightWindow()
        elif self._state == "warmup":
            self._window = KinetoWindow(self._plan.detail, self._described, {DESCRIPTION: self._label})
        elif self.recording.description:
            light = DeviceWindow(self._path, {DESCRIBED_BY: self._label})
            self._window, self._mark = light, light.mark
        else:
            self._window = KinetoWindow(self._plan.detail, self._path)
        self._window.start()
        self._apart.opened()
        self._marked.enter_context(marked_synchronisations(self._mark))
        self.ranges.on = True
        if self._state != "settle":
            self._begin_step_range()

    def _close(self) -> None:
        self._guard.rest()
        if self._window is None:
            return
        self._end_step_range()
        self._marked.close()
        stretch, self._window = self._window.stop(), None
        self._apart.closed()
        self.ranges.on = False
        self.recording.events = stretch.events
        self.recording.seconds_kept = stretch.seconds

    def _begin_step_range(self) -> None:
        self._close_step = self._mark(f"{STEP}{self.recording.steps_seen}")

    def _end_step_range(self) -> None:
        if self._close_step:
            self._close_step()
            self._close_step = None

    def _finish(self) -> None:
        self._close()
        if self._state == "active":
            self.recording.trace = None if self._plan.nvtx else self._path
            if self.recording.steps_kept and not self.recording.cut:
                self.recording.recorded_us = self.recording.seconds_kept / self.recording.steps_kept * 1e6
        if not self.recording.trace:
            self.recording.description = None
            for path in (self._path, self._described):
                path.unlink(missing_ok=True)
        self._state = "done"
        self.recording.seconds = time.perf_counter() - self._began
        self._kept(self.recording)
