"""`tilewright bench`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright.bench.catalogue import SUITES
from tilewright.cli import completion
from tilewright.cli.options import AsJson, Device, Inputs, Quiet, Training, device_here, time_given
from tilewright.cli.output import show, stages
from tilewright.records.errors import UsageError, VerificationError

if TYPE_CHECKING:
    from tilewright.records.case import Case
    from tilewright.records.suite import Suite
    from tilewright.records.suite_filter import SuiteFilter


def bench(
    target: Annotated[
        str,
        typer.Argument(help=f"file.py:name, or an operator: {', '.join(SUITES)}.", autocompletion=completion.operators),
    ],
    inputs: Inputs = None,
    training: Training = None,
    impl: Annotated[str, typer.Option(help="Implementations, comma-separated; default: all.")] = "",
    shapes: Annotated[str, typer.Option(help="Sizes, comma-separated: 100x5000,65536x8192.")] = "",
    dtype: Annotated[
        str, typer.Option(help="bf16,fp32,...; default: the operator's.", autocompletion=completion.dtypes)
    ] = "",
    direction: Annotated[
        str, typer.Option(help="fwd,bwd,fwd+bwd; default: the operator's.", autocompletion=completion.directions)
    ] = "",
    sweep: Annotated[str, typer.Option(help="A named series of the operator's sizes; a wrong name lists them.")] = "",
    shard: Annotated[str, typer.Option(help="I/N: every N-th race, beginning with the I-th, for long runs.")] = "1/1",
    suite: Annotated[str, typer.Option(help="The name in result files; default: the operator's or case's.")] = "",
    device: Device = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Seconds to measure: of each race of an operator, or of a whole case.", callback=time_given),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw an operator's rates over sizes: .png, .svg, .html.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write JSON lines; a row replaces an older row of the same measurement.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Time every implementation of an operator or a model side by side, and verify their results."""
    from tilewright.bench import suite_named
    from tilewright.measure.racing.results import check_results
    from tilewright.records.cxx import require_compiler
    from tilewright.records.suite_filter import SuiteFilter

    wanted = SuiteFilter.parse(impl=impl, shapes=shapes, dtype=dtype, direction=direction, sweep=sweep, shard=shard)
    operator = suite_named(target)
    for_cases = {"--inputs": inputs, "--training": training, "--suite": suite}
    for_operators = {"--shapes": shapes, "--dtype": dtype, "--direction": direction, "--sweep": sweep, "--plot": plot}
    _refuse(
        for_cases if operator else for_operators,
        f"{target} is {'an operator with its own inputs' if operator else 'a case'}",
    )
    where = device_here(device)
    if out:
        check_results(out)
    if where == "cpu":
        require_compiler()
    if operator:
        _bench_operator(operator, wanted, where, seconds or 3.0, out, plot, as_json, quiet)
        return
    from tilewright.case_names import load_case

    case = load_case(target, inputs, training=training)
    _bench_case(case, wanted, suite, where, seconds or 20.0, out, as_json, quiet)


def _refuse(options: Mapping[str, object], why: str) -> None:
    """UsageError for options that were given but do not apply."""
    given = [name for name, value in options.items() if value not in (None, "")]
    if given:
        raise UsageError(f"{why}: leave {', '.join(given)} out")


def _bench_operator(
    suite: Suite,
    wanted: SuiteFilter,
    device: str,
    seconds: float,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    from tilewright.bench import RaceResult, bench_suite, faults, remarks
    from tilewright.measure.racing.results import append_results, as_line
    from tilewright.report import bench_plot
    from tilewright.report.bench_table import show_race

    if plot:
        bench_plot.check(plot)

    def done(result: RaceResult) -> None:
        # Written after each race, so that an interrupted run keeps its results.
        if out:
            append_results(out, result.rows, gone=result.invalidates)
        if as_json:
            for row in result.rows:
                print(as_line(row))
        else:
            show(show_race(result.title, result.rows, remarks(result), result.unit))

    with stages(quiet or as_json) as tell:
        run = bench_suite(suite, wanted, device=device, seconds=seconds, tell=tell, done=done)
    rows = [row for result in run for row in result.rows]
    if plot and rows:
        bench_plot.draw(rows, run[0].unit, plot)
    faulty = [line for result in run for line in faults(result)]
    if faulty:
        raise VerificationError("\n".join(faulty))


def _bench_case(
    case: Case,
    wanted: SuiteFilter,
    suite: str,
    device: str,
    seconds: float,
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    from tilewright.measure.racing.results import append_results, as_line
    from tilewright.report.bench_table import show_race
    from tilewright.report.terminal import fallbacks
    from tilewright.verbs import bench_case

    with stages(quiet or as_json) as tell:
        program, rows = bench_case(
            case, suite=suite or case.name, impls=wanted.impls, device=device, seconds=seconds, tell=tell
        )
    if out:
        append_results(out, rows)
    if as_json:
        for row in rows:
            print(as_line(row))
    else:
        title = f"{rows[0].suite} {rows[0].case} {rows[0].direction}"
        show(show_race(title, rows, [str(line) for line in fallbacks(program)], "TFLOP/s"))
