"""`optimize`: a case compiled, verified, timed and stored as a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.records.case import Case, leaves
from tilewright.records.errors import CaptureError, warn_once
from tilewright.records.measurement import Measurement, Verified
from tilewright.records.program import Decision, GraphName, Program, Region, Stage
from tilewright.report.displayable import Displayable
from tilewright.report.progress import progress_of
from tilewright.report.quantity import duration
from tilewright.verbs.bench import PEERS, measure
from tilewright.verbs.explanation import case_of, ceilings_of
from tilewright.verbs.subject import Subject

if TYPE_CHECKING:
    from tilewright.backend import Recording
    from tilewright.compile.price import PricedCase
    from tilewright.hardware.profiles import DeviceProfile

TOP = 5
BELOW = 0.8
"""Share of its floor below which a case shows that a ceiling is wrong."""


@dataclass(repr=False)
class Optimized(Displayable):
    """One optimised case: its program, verification and times, and the paths of its run and page."""

    case: Case
    program: Program
    verified: list[Verified]
    measurements: list[Measurement]
    run: Path
    page: Path
    top: int = TOP
    """How many of the launches that lose time are shown."""

    def lost_time(self) -> list[dict[str, Any]]:
        """The `top` launches by the time that they lose to their floors: rows of the run's view `lost_time`."""
        from tilewright.store import query

        columns, rows = query(self.run, f"FROM lost_time WHERE lost_us > 0 LIMIT {self.top}")
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def page_file(self) -> Path:
        return self.page

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        from tilewright.report.optimised import show_optimize

        paths = (f"run   {self.run}", f"page  {self.page}")
        return Group(
            show_optimize(self.run, self.top), *(Text(path, no_wrap=True, overflow="ignore") for path in paths)
        )


def optimize(
    model: Callable[..., Any], *inputs: Any, training: bool = False, seconds: float = 20.0, **keywords: Any
) -> Optimized:
    """`optimize_case` for `model(*inputs, **keywords)`, on the device of its first tensor.

    `torch.compile(model, backend="tilewright")` is what it measures, for at most `seconds`; nothing of `model` is
    changed.
    """
    from tilewright.pytorch.state import has_values

    case = case_of(model, inputs, training, keywords)
    device = next((str(t.device) for t in leaves((inputs, keywords)) if has_values(t)), "cpu")
    with progress_of(f"optimizing {case.name}") as tell:
        return optimize_case(case, device=device, seconds=seconds, tell=tell)


def optimize_case(
    case: Case,
    *,
    command: str = "tilewright.optimize",
    device: str = "cpu",
    seconds: float = 20.0,
    tell: Callable[[str], None] = lambda _: None,
) -> Optimized:
    """Capture, explain, fuse, verify against float64, measure beside eager and Inductor, and store.

    A case that is not one graph is measured in the graphs into which `torch.compile` cuts it.

    A case that takes clearly less than its floor has the ceilings measured again, and is priced with them.
    `seconds` bounds the timing; `tell` receives a line before each stage. A tensor that breaks the
    numbers contract has `ok=False` in `verified`; the run is written all the same, and nothing of it
    is left where anything fails or the user interrupts. Raises CaptureError, InputError,
    CompilerError (nothing can be raced without a compiler), CacheError or StoreError.
    """
    from tilewright.hardware.detect import detect
    from tilewright.hardware.profiles import local_profile, remeasured_profile
    from tilewright.hardware.summary import machine_report
    from tilewright.records.cache import ensure_usable
    from tilewright.records.cxx import require_compiler
    from tilewright.report.page import write_page
    from tilewright.store.run import Run
    from tilewright.store.run_paths import new_run_path

    if device == "cpu":
        require_compiler()
        # Compiling alone would do without one; a second run would not show what this one decided.
        ensure_usable()
    path = new_run_path(case.name)
    machine = dict(machine_report(detect()))
    # Begun before the work, which takes a minute: a folder that cannot be written is said at once.
    with Run.create(
        path, command=command, target=case.name, case=case.name, dims=case.named_sizes(), machine=machine
    ) as run:
        tell("measuring this machine's ceilings")
        profile = local_profile(device=device)
        done = _optimized(case, profile, device, seconds, tell)
        if done.beats_its_floor:
            tell("measuring this machine's ceilings again: the case took less than its floor")
            if (better := remeasured_profile(device)) is not None:
                profile, done = better, _optimized(case, better, device, seconds, tell, done)
        if done.beats_its_floor:
            warn_once(
                f"{case.name} took {duration(done.measured_us)}, less than its floor of {duration(done.floor_us)}: its "
                "data stay in a cache, or the ceilings were measured beside other programs; on an idle machine "
                "`tilewright doctor --refresh` measures them again"
            )
        run.add_program(done.program)
        run.add(ceilings_of(profile))
        run.add(done.verified)
        run.add(done.measurements)
    page = write_page(path, path.with_suffix(".html"))
    return Optimized(case, done.program, done.verified, done.measurements, path, page)


@dataclass
class _Outcome:
    """A case priced, verified and timed with the ceilings of one profile."""

    program: Program
    verified: list[Verified]
    measurements: list[Measurement]

    @property
    def floor_us(self) -> float:
        return sum(launch.floor_us or 0.0 for launch in self.program.operators if launch.stage == "after")

    @property
    def measured_us(self) -> float:
        return next((row.median_us for row in self.measurements if row.impl == "tilewright"), math.inf)

    @property
    def beats_its_floor(self) -> bool:
        return self.measured_us < BELOW * self.floor_us

    def runs_as(self, program: Program) -> bool:
        """Whether both run the same kernels and library calls."""
        return _launched(self.program) == _launched(program)

    def priced(self, program: Program) -> _Outcome:
        """What was measured here, with the prices of a program that runs as this one."""
        times = {(one.graph, one.stage, one.name): one.measured_us for one in self.program.operators}
        times |= {(one.graph, "after", one.name): one.measured_us for one in self.program.regions}
        timed = replace(_timed(program, times), fallbacks=self.program.fallbacks)
        predicted = sum(one.predicted_us or 0.0 for one in timed.operators if one.stage == "after")
        rows = [replace(row, predicted_us=predicted) if row.impl == "tilewright" else row for row in self.measurements]
        return _Outcome(timed, self.verified, rows)


def _launched(program: Program) -> tuple[list[Any], list[Any]]:
    return (
        [(one.graph, one.stage, one.name, one.target) for one in program.operators],
        [(one.graph, one.name, one.members, one.source_code, one.schedule) for one in program.regions],
    )


def _optimized(
    case: Case,
    profile: DeviceProfile,
    device: str,
    seconds: float,
    tell: Callable[[str], None],
    known: _Outcome | None = None,
) -> _Outcome:
    """`known` is the outcome with other ceilings: if they lead to the same kernels, only their prices are new."""
    from tilewright.compile.price import price_case
    from tilewright.hardware.target import Target
    from tilewright.verbs.pieces import program_in_pieces

    tell("pricing every operator, racing every fusion")
    try:
        priced: PricedCase | CaptureError = price_case(case, Target(profile, measures=True))
    except CaptureError as broken:
        priced = broken
    if known is not None and not isinstance(priced, CaptureError) and known.runs_as(priced.program):
        return known.priced(priced.program)
    tell("compiling, and timing every kernel")
    subject = Subject(case, device)
    if isinstance(priced, CaptureError):
        program = program_in_pieces(subject, profile, priced)
    else:
        subject.compile("tilewright")
        program = with_times(priced, subject.recording, device)
    tell("verifying against float64")
    verified = subject.verified("tilewright")
    tell(f"timing tilewright beside {' and '.join(PEERS)}")
    return _Outcome(program, verified, measure(subject, program, suite="optimize", seconds=seconds))


def with_times(priced: PricedCase, recording: Recording, device: str = "cpu") -> Program:
    """The program with the measured time of every launch on `device`: eager's operators one by one, tilewright's as the
    program runs, as they are predicted."""
    from tilewright.runtime.stopwatch import example_inputs, time_in_place, time_operators

    times: dict[tuple[GraphName, Stage, str], float | None] = {}
    for name, graph in priced.eager.graphs.items():
        for operator, us in time_operators(graph, example_inputs(graph), device).items():
            times[name, "before", operator] = us
    for compiled in recording.graphs:
        for step, time in time_in_place(compiled.executable, example_inputs(compiled.plan.graph), device).items():
            times[compiled.plan.name, "after", step] = time.us
    program = _timed(priced.program, times)
    return replace(program, fallbacks=program.fallbacks + recording.fallbacks)


def _timed(program: Program, times: Mapping[tuple[GraphName, Stage, str], float | None]) -> Program:
    regions = [replace(r, measured_us=times.get((r.graph, "after", r.name))) for r in program.regions]
    return replace(
        program,
        operators=[replace(o, measured_us=times.get((o.graph, o.stage, o.name))) for o in program.operators],
        regions=regions,
        decisions=[_with_time(decision, regions) for decision in program.decisions],
    )


def _with_time(decision: Decision, regions: Sequence[Region]) -> Decision:
    """The decision with the measured time of the kernel that computes both of its operators, unless it was raced."""
    pair, graph = {decision.producer, decision.consumer}, decision.graph
    found = (r.measured_us for r in regions if r.graph == graph and pair <= {*r.members})
    us = decision.measured_us
    return replace(decision, measured_us=next(found, None) if us is None and decision.verdict == "taken" else us)
