"""Saves recordings as a run: loads and analyses the traces, and adds the cost of the case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.hardware.ceilings import device_name, kept_ceilings
from tilewright.hardware.detect import Machine, detect
from tilewright.measure.recording.plan import Recording
from tilewright.records.counted import counted
from tilewright.records.errors import TraceError
from tilewright.records.measurement import Ceiling
from tilewright.records.program import Program
from tilewright.report.displayable import Displayable
from tilewright.store.query import reading
from tilewright.store.run import Run
from tilewright.store.run_paths import new_run_path
from tilewright.trace import analyse, load_traces
from tilewright.trace.events.rows import append
from tilewright.trace.operators.operator_table import OperatorTable, read_operator_table
from tilewright.trace.whatif.answer import add_predictions

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


_NO_CEILINGS = (
    "There are no floors and verdicts: the ceilings of this machine with this number of threads were not measured. "
    "`tilewright doctor` measures them in some seconds, and the next profile has them."
)


@dataclass(repr=False)
class SavedProfile(Displayable):
    """A saved profile: the path of its run, its operator table, and its recordings. Shows itself."""

    run: Path
    table: OperatorTable
    recordings: Sequence[Recording]
    has_ceilings: bool = True
    exit_code: int = 0
    """The exit code of the profiled program."""

    def page_file(self) -> Path:
        """Written when it is first asked for."""
        from tilewright.report.page import write_page

        page = self.run.with_suffix(".html")
        return page if page.exists() else write_page(self.run, page)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        from tilewright.report.accounting import show_accounting
        from tilewright.report.profile import show_profile
        from tilewright.report.verdict import show_verdict

        shown = [show_verdict(self.run), show_profile(self.run, self.table, self.recordings), show_accounting(self.run)]
        if not self.has_ceilings:
            shown.append(Text(f"\n{_NO_CEILINGS}", "yellow"))
        return Group(*shown)


def save(
    recordings: Sequence[Recording], *, name: str, command: str, target: str, dims: Mapping[str, int] | None = None,
    program: Program | None = None, ceilings: Sequence[Ceiling] = (), tell: Callable[[str], None] = lambda _: None,
) -> SavedProfile:  # fmt: skip
    """A new run with the traces of `recordings`, one per process, and the costs of `program` if given.

    Without `ceilings`, floors use the stored ones of an earlier measurement.
    Raises TraceError if nothing was recorded, StoreError if the run cannot be written.
    """
    from tilewright.hardware.summary import machine_report

    kept = [recording for recording in recordings if recording.trace]
    if not kept:
        raise TraceError(_nothing(recordings))
    found = detect()
    machine = dict(machine_report(found))
    path = new_run_path(name)
    with Run.create(path, command=command, target=target, case=name, dims=dims, machine=machine) as run:
        if program:
            run.add_program(program)
        ceilings = ceilings or _kept_ceilings(found)
        run.add(ceilings)
        tell("reading the trace")
        paths = [path for recording in kept for path in (recording.trace, recording.description) if path]
        loaded = load_traces(paths, run.connection)
        _add_recordings(run.connection, dict(zip(paths, (file.id for file in loaded), strict=True)), kept)
        tell("attributing its time")
        analyse(run.connection)
        add_predictions(run.connection)
    with reading(path) as connection:
        return SavedProfile(path, read_operator_table(connection), kept, has_ceilings=bool(ceilings))


def _kept_ceilings(machine: Machine) -> list[Ceiling]:
    """The stored ceilings of this machine's CPU and GPUs."""
    names = dict.fromkeys([device_name(machine, "cpu"), *(gpu.name for gpu in machine.gpus)])
    return [ceiling for name in names for ceiling in kept_ceilings(name) or ()]


def _add_recordings(connection: DuckDBPyConnection, files: Mapping[Path, int], kept: Sequence[Recording]) -> None:
    rows = []
    for it in kept:
        assert it.trace is not None, "others were left out"
        plan, detail = it.plan, it.plan.detail
        rows.append(
            (
                *(files[it.trace], files[it.description] if it.description else None, plan.active),
                *(it.steps_kept, it.steps_seen, it.step_events, it.events, plan.events, it.cut),
                *(
                    it.seconds_kept,
                    it.seconds,
                    it.bare_us,
                    it.recorded_us,
                    it.timed_us,
                    it.timed_queued_us,
                    it.recorded_thread_us,
                    it.recorded_queued_us,
                ),
                *((of.thread_us, of.other_us, of.other) if (of := it.processors) else (None, None, None)),
                it.beside,
                *((of.workers, of.workers_us, of.workers_queued_us) if of else (0, None, None)),
                *(detail.shapes, detail.stacks, detail.memory),
            )
        )
    append(connection, "recording", rows)


def _nothing(recordings: Sequence[Recording]) -> str:
    if not recordings:
        return "nothing was recorded: the program ended before the recording began"
    plan, ended = recordings[0].plan, recordings[0].steps_seen
    if recordings[0].gave_way:
        return (
            "nothing was recorded: the program started a profiler of its own before the recording began; "
            "run it without, or load the trace that it writes with `tilewright trace`"
        )
    if not ended:
        return (
            "nothing was recorded: the program made no step of an optimizer, no backward, called no model twice that "
            "no optimizer updates, and no compiled function; --whole records a program without steps"
        )
    needed = plan.wait + plan.warmup + bool(plan.warmup) + bool(recordings[0].description) + 1
    return (
        f"nothing was recorded: the program made {counted(ended, 'step')}, and recording begins with step {needed}; "
        "lower --wait, or record from the start with --whole"
    )
