"""`with tilewright.profile() as run:` – a block of the user's own program."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from tilewright import backend
from tilewright.backend import Recording as CompiledRecording
from tilewright.measure.recording.recorder import Recorder, Recording, RecordingPlan
from tilewright.measure.recording.windows import Detail
from tilewright.profiling.compiled import program_of
from tilewright.profiling.regions import marked_regions
from tilewright.profiling.saved import Profiled, save
from tilewright.report.shown import Shown


class Profile(Shown):
    """What `tilewright.profile()` gives: a recording while it is entered, and a run after it."""

    def __init__(self, plan: RecordingPlan, name: str) -> None:
        self._plan = plan
        self._name = name
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._recorder: Recorder | None = None
        self._compiled: CompiledRecording | None = None
        self._entered = ExitStack()
        self._profiled: Profiled | None = None

    @property
    def path(self) -> Path:
        """The run, once the block has ended."""
        return self._result.run

    @property
    def recording(self) -> Recording:
        """What was recorded, once the block has ended."""
        return self._result.recordings[0]

    def step(self) -> None:
        """One step ended; the next one begins."""
        if self._recorder is None:
            raise RuntimeError("step() belongs inside the block: with tilewright.profile() as run: ...")
        self._recorder.step()

    def __enter__(self) -> Profile:
        self._folder = tempfile.TemporaryDirectory(prefix="tilewright-profile-")
        self._recorder = Recorder(self._plan, Path(self._folder.name), by_optimizer=not self._plan.whole)
        self._compiled = self._entered.enter_context(backend.recording())
        self._entered.enter_context(marked_regions(self._recorder))
        self._recorder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._recorder and self._folder and self._compiled, "entered first"
        with self._folder:
            recording = self._recorder.stop()
            self._entered.close()
            if kind is None:
                target = Path(sys.argv[0]).name or "python"
                program = program_of(self._compiled)
                self._profiled = save(
                    [recording], name=self._name, command="tilewright.profile", target=target, program=program
                )

    @property
    def _result(self) -> Profiled:
        if self._profiled is None:
            raise RuntimeError("the profile is there once its block has ended without an exception")
        return self._profiled

    def __rich__(self) -> Any:
        return self._result


def profile(
    name: str = "profile",
    *,
    wait: int = 0,
    warmup: int = 0,
    active: int = 0,
    events: int = RecordingPlan.events,
    shapes: bool = True,
    stacks: bool = True,
    memory: bool = True,
    layers: bool = True,
    light: bool = True,
) -> Profile:
    """Record a block of PyTorch code into a run, with ranges around its phases and layers.

        with tilewright.profile() as run:
            train_step()
        print(run)

    Without a schedule all of the block is recorded, up to `events`; `run.step()` then only marks where one
    step ends. With `active`, `wait` steps run bare, `warmup` steps are recorded to count their events, one
    more runs bare, and up to `active` are kept; a step ends where `run.step()` is called, or else where an
    optimizer's step ends. After a warm-up and where a GPU is at work, `light` records no operators of the kept
    steps, so that they take the time that they do without a profiler, and shows those of the warm-up. What was
    sampled is said by `print(run)` and in the run's table `recording`.
    What `backend="tilewright"` compiles inside the block is in the run with its cost.

    Raises TraceError at the end of the block where nothing was recorded, StoreError where no run can be written.
    """
    plan = RecordingPlan(
        wait, warmup, active, events, Detail(shapes, stacks, memory), layers, whole=not active, light=light
    )
    return Profile(plan, name)
