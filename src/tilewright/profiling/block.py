"""`with tilewright.profile() as run:` records a block of a program."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from tilewright.compile import recording as compilations
from tilewright.measure.recording.plan import Detail, Recording, RecordingPlan
from tilewright.measure.recording.recorder import Recorder
from tilewright.profiling.compiled import program_of
from tilewright.profiling.regions import marked_regions
from tilewright.profiling.saved import SavedProfile, save
from tilewright.records.errors import TilewrightError
from tilewright.records.program import Program
from tilewright.report.displayable import Displayable
from tilewright.report.progress import progress_of


class Profile(Displayable):
    """The result of `tilewright.profile()`: records while entered, and is a run afterwards."""

    def __init__(self, plan: RecordingPlan, name: str) -> None:
        self._plan = plan
        self._name = name
        self._why = ""
        """Why there is no run, if the recorder failed."""
        self._recorder: Recorder | None = None
        self._compiled: compilations.Recording | None = None
        self._entered = ExitStack()
        self._profiled: SavedProfile | None = None

    @property
    def path(self) -> Path:
        """The path of the run; available after the block."""
        return self._result.run

    @property
    def recording(self) -> Recording:
        """The recording; available after the block."""
        return self._result.recordings[0]

    def step(self) -> None:
        """Mark the end of a step."""
        if self._recorder is not None:
            self._recorder.step()
        elif not self._why:
            raise RuntimeError("call step() inside the block: with tilewright.profile() as run: ...")

    def __enter__(self) -> Profile:
        try:
            with ExitStack() as entered:
                folder = Path(entered.enter_context(tempfile.TemporaryDirectory(prefix="tilewright-profile-")))
                recorder = Recorder(self._plan, folder, by_optimizer=not self._plan.whole)
                self._compiled = entered.enter_context(compilations.recording())
                entered.enter_context(marked_regions(recorder))
                recorder.start()
                self._recorder, self._entered = recorder, entered.pop_all()
        except Exception as failure:
            self._fails(failure)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._recorder is None or self._compiled is None:
            return
        try:
            with self._entered:
                self._save(self._recorder.stop(), program_of(self._compiled))
        except Exception as failure:
            self._fails(failure)
        else:
            if error is not None:
                print(f"tilewright: what was recorded before {error!r} is in {self.path}", file=sys.stderr)

    def _fails(self, failure: Exception) -> None:
        """Say why there is no run, and let the program go on."""
        kind = "" if isinstance(failure, TilewrightError) else f"{type(failure).__name__}: "
        self._why = f"{kind}{failure}"
        print(f"tilewright: no profile: {self._why}", file=sys.stderr, flush=True)

    def _save(self, recording: Recording, program: Program) -> None:
        target = Path(sys.argv[0]).name or "python"
        with progress_of("writing the profile") as tell:
            self._profiled = save(
                [recording], name=self._name, command="tilewright.profile", target=target, program=program, tell=tell
            )

    @property
    def _result(self) -> SavedProfile:
        if self._profiled is None:
            raise RuntimeError(
                f"there is no profile: {self._why}"
                if self._why
                else "the profile is available after its block has ended"
            )
        return self._profiled

    def page_file(self) -> Path | None:
        return None if self._profiled is None else self._profiled.page_file()

    def __rich__(self) -> Any:
        return self._profiled or "a profile that has recorded nothing yet: with tilewright.profile() as run: ..."


def profile(
    name: str = "profile", *, wait: int = 0, warmup: int = 0, active: int = 0, events: int = RecordingPlan.events,
    shapes: bool = True, stacks: bool = True, memory: bool = True, layers: bool = True, light: bool = True,
) -> Profile:  # fmt: skip
    """Record a block of PyTorch code into a run, with ranges around its phases and layers.

        with tilewright.profile() as run:
            train_step()
        print(run)

    Without a schedule the whole block is recorded, up to `events`; `run.step()` then only marks the end of a
    step. With `active`, `wait` steps run without a profiler, `warmup` steps are recorded to count their events, one
    more runs without a profiler, and up to `active` steps are kept; a step ends at `run.step()`, or if that is never
    called at an optimizer's step. After a warm-up on a GPU, `light` records no operators in the kept steps, so that
    they are as fast as without a profiler, and shows those of the warm-up. `print(run)` and the run's table
    `recording` say which steps were recorded.
    Graphs that `backend="tilewright"` compiles inside the block are in the run with their cost.

    PyTorch has one profiler at a time: where the block starts another one, or another of these, the recording ends.
    An exception in the block keeps what was recorded.

    The block raises nothing of its own: if a profiler of PyTorch's runs already, if nothing was recorded, if the run
    cannot be written, or if the recorder fails, a line on standard error says so, and `run.path` raises RuntimeError.
    """
    plan = RecordingPlan(
        wait, warmup, active, events, Detail(shapes, stacks, memory), layers, whole=not active, light=light
    )
    return Profile(plan, name)
