"""Every launch of a compiled model: its predicted time beside its measured one, and what `explain` says would run.

python -m benchmarks.models --device cuda --entrants tilewright --launches launches.jsonl
python -m benchmarks.model_launches launches.jsonl       # the tables of rows that were kept
python -m benchmarks.model_launches launches.jsonl --fit # coefficients for `hardware/kernel_times.py`, and their errors
python -m benchmarks.model_launches launches.jsonl --keep # the same for this machine's GPU, kept beside its ceilings
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.model_zoo import Workload
from tilewright.compile.capture import capture
from tilewright.compile.launches import works
from tilewright.compile.planner import Planner
from tilewright.compile.recording import CompiledGraph, Recording
from tilewright.cost.fit import Timed, fit
from tilewright.cost.work import Work, predicted_us
from tilewright.hardware.ceilings import keep_kernel_times
from tilewright.hardware.kernel_times import KernelTimes
from tilewright.hardware.profiles import DeviceProfile, local_profile, profile_for
from tilewright.hardware.target import absent
from tilewright.passes.fusion import Region
from tilewright.records.case import Case, InputSpec
from tilewright.records.errors import TilewrightError
from tilewright.records.recipe import Launch
from tilewright.runtime.executable import CallStep, Executable
from tilewright.runtime.stopwatch import time_in_place

Explained = list[tuple[str, str, str]] | str
COPY = "Memcpy"
"""The copy of a number on the CPU that a kernel on the GPU reads."""
AFTER = "_after"
"""The suffix of the name of a generated kernel's second Triton kernel."""
SHOWN = 12
"""Launches in the list of those whose prediction is wrong by the most time."""


@dataclass(frozen=True)
class LaunchRow:
    """A launch of a compiled model. `what` is the generated kernel's name or the operator called."""

    model: str
    kind: str
    graph: str
    name: str
    what: str
    generated: bool
    measured_us: float
    predicted_us: float | None
    """None where the work is unknown."""
    work: Mapping[str, Any] | None
    kernels: tuple[str, ...]
    """Names of what ran on the GPU."""
    recipe: tuple[str, ...] = ()
    """Names of the kernels that the recipe of one of tilewright's operators launches."""

    @property
    def error(self) -> float | None:
        """|predicted / measured - 1|."""
        return None if self.predicted_us is None else abs(self.predicted_us / self.measured_us - 1)


@contextmanager
def inputs_of(graphs: Iterable[CompiledGraph]) -> Iterator[dict[Executable, list[Any]]]:
    """The inputs of the first call of each graph inside the block."""
    wanted = {graph.executable for graph in graphs}
    seen: dict[Executable, list[Any]] = {}
    call = Executable.__call__

    def observed(self: Executable, args: list[Any]) -> Any:
        if self in wanted and self not in seen:
            seen[self] = list(args)
        return call(self, args)

    Executable.__call__ = observed  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Executable.__call__ = call  # type: ignore[method-assign]


def launch_rows(
    model: str, kind: str, record: Recording, step: Callable[[], object], device: str, profile: DeviceProfile
) -> list[LaunchRow]:
    """The launches of all graphs that a call of `step` runs, on the inputs of that call."""
    with inputs_of(record.graphs) as seen:
        step()
    return [
        row
        for graph in record.graphs
        if graph.executable in seen
        for row in _rows(model, kind, graph, seen[graph.executable], device, profile)
    ]


def _rows(
    model: str, kind: str, graph: CompiledGraph, inputs: list[Any], device: str, profile: DeviceProfile
) -> Iterator[LaunchRow]:
    steps = {step.name: step for step in graph.executable.steps}
    with torch.no_grad():
        times = time_in_place(graph.executable, inputs, device)
    for unit, work in works(graph.plan):
        # A step that launches nothing, as a reshape in place, has no time.
        if unit.name not in times:
            continue
        generated, step = isinstance(unit, Region), steps[unit.name]
        recipe = step.recipe if isinstance(step, CallStep) else None
        yield LaunchRow(
            model,
            kind,
            graph.plan.name,
            unit.name,
            unit.kernel if isinstance(unit, Region) else str(unit.target),
            generated,
            times[unit.name].us,
            None if work is None else predicted_us(work, profile),
            None if work is None else asdict(work),
            times[unit.name].kernels,
            () if recipe is None else tuple(str(a.kernel.name) for a in recipe.actions if isinstance(a, Launch)),
        )


class _Positional(nn.Module):
    """A model called by the places of its arguments, as a case calls it."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *inputs: Tensor) -> Any:
        # A case's inputs want gradients in training; those of a model do not.
        return self.model(**{name: x.detach() for name, x in zip(self.names, inputs, strict=True)})


def explained(workload: Workload, trains: bool, profile: DeviceProfile) -> Explained:
    """Graph, unit and kernel or operator of each launch that is planned for a device that is not there.

    The model and its inputs are on the CPU. A line where no plan can be made, as for a model that is not one graph.
    """
    inputs = [InputSpec.of(t) for t in workload.inputs.values()]
    model = _Positional(workload.model.train(trains), tuple(workload.inputs))
    case = Case("model", lambda: model, inputs, training=trains)
    try:
        plan = capture(case, Planner(absent(profile))).plan
    except TilewrightError as error:
        return str(error).splitlines()[0]
    assert plan is not None
    kernels = {unit.name: unit.kernel for graph in plan.graphs for unit in graph.units if isinstance(unit, Region)}
    return [(graph, name, kernels[name] if what == "kernel" else what) for graph, name, what in plan.launches()]


def differences(planned: list[tuple[str, str, str]], rows: Iterable[LaunchRow]) -> list[str]:
    """Compares explained launches with those that ran: generated and own kernels by the profiler's names, library
    calls by operator; one line for each name whose count differs."""
    lines = []
    ran: Counter[str] = Counter()
    for row in rows:
        ran[row.what] += 1
        if row.generated and row.kernels:
            seen = {name.removesuffix(AFTER) for name in row.kernels if not name.startswith(COPY)}
            if seen != {row.what}:
                lines.append(f"{row.what} ran as {', '.join(sorted(seen))}")
        elif not all(any(_is(name, kernel) for kernel in row.kernels) for name in row.recipe):
            lines.append(f"{row.what} ran as {', '.join(row.kernels)}, not as {', '.join(row.recipe)}")
    said = Counter(what for _, _, what in planned)
    for what in sorted(set(said) | set(ran)):
        # A call that makes a view, or nothing, launches no kernel: explained, and not seen.
        if ran[what] > said[what] or (ran[what] < said[what] and (ran[what] or not what.startswith("aten."))):
            lines.append(f"{what}: {said[what]} planned, {ran[what]} ran")
    return lines


def _is(name: str, kernel: str) -> bool:
    """Whether the profiler's name of a kernel is that of a recipe, with or without its signature."""
    return re.search(rf"\b{re.escape(name)}\b", kernel) is not None


def table(rows: list[LaunchRow]) -> str:
    """Errors by kind of kernel and of all, errors by model, and the launches that are wrong by the most time."""
    known = [row for row in rows if row.error is not None]
    by_kind: dict[str, list[LaunchRow]] = {}
    by_model: dict[str, list[LaunchRow]] = {}
    for row in known:
        assert row.work is not None
        by_kind.setdefault(row.work["kind"], []).append(row)
        by_model.setdefault(f"{row.model} {row.kind}", []).append(row)
    total = sum(row.measured_us for row in rows) or 1.0
    unknown = [row for row in rows if row.error is None]
    lines = [f"{'kind':40} {'n':>5} {'median':>7} {'p95':>7} {'time':>6} {'bias':>6}"]
    ordered = sorted(by_kind.items(), key=lambda item: -sum(row.measured_us for row in item[1]))
    lines += [_line(kind, several, total) for kind, several in ordered]
    lines.append(_line("ALL", known, total))
    lines.append(
        f"of unknown work: {len(unknown)} launches, {sum(row.measured_us for row in unknown) / total:.1%} of the time: "
        + ", ".join(f"{n} × {what}" for what, n in Counter(row.what for row in unknown).most_common(8))
    )
    lines += [_line(name, several, total) for name, several in sorted(by_model.items())]
    wrong: dict[tuple[Any, ...], list[LaunchRow]] = {}
    for row in known:
        wrong.setdefault((row.model, row.kind, row.what, json.dumps(row.work)), []).append(row)
    worst = sorted(wrong.values(), key=lambda rows: -sum(abs(r.measured_us - (r.predicted_us or 0)) for r in rows))
    for several in worst[:SHOWN]:
        row, work = several[0], several[0].work
        assert work is not None and row.predicted_us is not None
        lines.append(
            f"{len(several):3} × {row.model:12} {row.kind:5} {row.what[:50]:50} {work['kind'][:24]:24} "
            f"{median(r.measured_us for r in several):8.1f} us, predicted {row.predicted_us:8.1f}"
        )
    return "\n".join(lines)


def _line(name: str, rows: list[LaunchRow], total: float) -> str:
    errors = sorted(row.error for row in rows if row.error is not None)
    if not errors:
        return f"{name[:40]:40}     0"
    measured = sum(row.measured_us for row in rows)
    bias = sum(row.predicted_us or 0.0 for row in rows) / measured
    p95 = errors[min(int(0.95 * len(errors)), len(errors) - 1)]
    return f"{name[:40]:40} {len(rows):5} {median(errors):7.1%} {p95:7.1%} {measured / total:6.1%} {bias:6.2f}"


def write(path: Path, rows: Iterable[LaunchRow]) -> None:
    with path.open("a") as out:
        out.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def read(path: Path) -> list[LaunchRow]:
    return [LaunchRow(**json.loads(line)) for line in path.read_text().splitlines()]


def work_of(row: LaunchRow) -> Work:
    """The work of a row that was read."""
    assert row.work is not None
    pairs = {name: tuple(map(tuple, row.work[name])) for name in ("products", "distances")}
    return Work(**{**row.work, **pairs})


def coefficients(rows: Iterable[LaunchRow], profile: DeviceProfile) -> KernelTimes:
    """Coefficients fitted to the rows' kinds on the device of `profile`."""
    return fit((Timed(row.what, work_of(row), row.measured_us) for row in rows if row.work is not None), profile)


def fitted(rows: list[LaunchRow], profile: DeviceProfile) -> str:
    """Coefficients fitted to all rows; before them the errors on each model by a fit of all others."""
    known = [row for row in rows if row.work is not None]
    models = sorted({row.model for row in known})

    def predicted(some: Iterable[LaunchRow], times: KernelTimes) -> list[LaunchRow]:
        by = replace(profile, kernel_times={**profile.kernel_times, **times})
        return [replace(row, predicted_us=predicted_us(work_of(row), by)) for row in some]

    total = sum(row.measured_us for row in known) or 1.0
    lines, held_out = [], []
    for model in models:
        times = coefficients((row for row in known if row.model != model), profile)
        found = predicted((row for row in known if row.model == model), times)
        held_out += found
        lines.append(_line(f"{model}, by a fit of the others", found, total))
    lines.append(_line("ALL, each by a fit of the others", held_out, total))
    times = coefficients(known, profile)
    lines.append(_line("ALL, fitted", predicted(known, times), total))
    lines += [f'    "{kind}": {found},' for kind, found in sorted({**profile.kernel_times, **times}.items())]
    return "\n".join(lines)


def _kept(rows: list[LaunchRow]) -> str:
    """Fit and keep for the GPU of this machine, on which the rows were timed."""
    profile = local_profile(device="cuda")
    place = keep_kernel_times(profile.name, {**profile.kernel_times, **coefficients(rows, profile)}, [])
    return f"{fitted(rows, profile)}\nkept in {place}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--fit", action="store_true", help="fit coefficients; of an H200")
    parser.add_argument("--keep", action="store_true", help="fit those of this machine's GPU, and keep them for it")
    given = parser.parse_args()
    kept = [row for path in given.rows for row in read(path)]
    print(_kept(kept) if given.keep else fitted(kept, profile_for("h200")) if given.fit else table(kept))
