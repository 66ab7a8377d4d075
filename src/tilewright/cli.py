"""The command line: wiring only. Every failure has one message and a documented exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tilewright.records.errors import TilewrightError, UsageError, VerificationError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
INTERRUPTED = 130

Target = Annotated[str, typer.Argument(help="file.py:name or package.module:name: a case, module or function.")]
Inputs = Annotated[str | None, typer.Option(help='Inputs of a module or function: "bf16[B=16,S=1024,D=768]".')]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results only.")]
Training = Annotated[
    bool | None, typer.Option("--training/--inference", help="Forward and backward, or forward alone.")
]
RunFile = Annotated[Path | None, typer.Option("--run", help="A run; the latest unless one is named.")]


def main() -> None:
    """Entry point of the `tilewright` command."""
    interrupted = "interrupted; nothing was left half-written"
    try:
        # What typer ends by itself (help, and in some versions Ctrl-C) comes back as an exit code.
        ended = app(standalone_mode=False)
        if ended == INTERRUPTED:
            _fail(interrupted, INTERRUPTED)
        sys.exit(ended)
    except TilewrightError as error:
        _fail(str(error), error.exit_code)
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        _fail(interrupted, INTERRUPTED)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        # click's own errors of usage carry an exit code and know how to show themselves.
        if hasattr(error, "exit_code") and hasattr(error, "format_message"):
            _fail(error.format_message(), UsageError.exit_code)
        raise


def _fail(message: str, code: int) -> None:
    # Without a command the help was printed, and its error has no text.
    if message:
        print(f"tilewright: {message}", file=sys.stderr)
    sys.exit(code)


@app.command()
def doctor(
    refresh: Annotated[bool, typer.Option(help="Measure the ceilings again.")] = False,
    as_json: AsJson = False,
) -> None:
    """The machine, its ceilings measured and from the datasheet."""
    from tilewright.hardware.detect import detect
    from tilewright.hardware.profiles import local_profile
    from tilewright.hardware.summary import machine_report
    from tilewright.verbs import ceilings_of

    with _working("measuring ceilings", quiet=as_json):
        profile = local_profile(refresh=refresh)
    report = machine_report(detect(), ceilings_of(profile), profile)
    if as_json:
        _print_json(dict(report))
        return
    width = max(len(label) for label, _ in report)
    for label, value in report:
        print(f"{label:<{width}}  {value}")


@app.command()
def explain(
    target: Target,
    inputs: Inputs = None,
    on: Annotated[str | None, typer.Option(help="h200, a100, rtx4090, 2080ti, cpu; default: this machine.")] = None,
    training: Training = None,
    tree: Annotated[bool, typer.Option(help="The graph as an annotated tree instead of tables.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Graph, costs, floors and planned fusions; runs nothing, needs no GPU."""
    from tilewright.targets import load_case
    from tilewright.verbs import explain_case, tree_of_case

    case = load_case(target, inputs, training=training)
    if tree:
        if as_json:
            raise UsageError("--tree is for reading; leave --json or --tree out")
        _show(tree_of_case(case))
        return
    with _working("capturing", quiet or as_json):
        explanation = explain_case(case, on)
    if as_json:
        from tilewright.report.terminal import as_json as program_json

        print(program_json(explanation.program, explanation.ceilings))
    else:
        _show(explanation)


@app.command()
def optimize(
    target: Target,
    inputs: Inputs = None,
    training: Training = None,
    device: Device = "cpu",
    seconds: Annotated[float, typer.Option(help="Time given to measuring.")] = 20.0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Capture, explain, fuse, verify, measure; writes a run and a page."""
    from tilewright.report.terminal import as_json as program_json
    from tilewright.report.terminal import show_optimize
    from tilewright.targets import load_case
    from tilewright.verbs import optimize_case

    case = load_case(target, inputs, training=training)
    with _stages(quiet or as_json) as tell:
        done = optimize_case(case, command=f"tilewright optimize {target}", device=device, seconds=seconds, tell=tell)
    if as_json:
        print(program_json(done.program, (), done.measurements, done.verified))
    else:
        _show(show_optimize(done.program, done.measurements, done.verified))
        print(f"run   {done.run}")
        print(f"page  {done.page}")
    broken = [v.tensor for v in done.verified if not v.ok]
    if broken:
        raise VerificationError(f"the numbers contract is broken for {', '.join(broken)}; see the run {done.run}")


@app.command()
def bench(
    target: Target,
    inputs: Inputs = None,
    training: Training = None,
    impl: Annotated[
        str, typer.Option(help="Comma-separated: eager, eager-sdpa, inductor, inductor-out, tilewright.")
    ] = "",
    suite: Annotated[str, typer.Option(help="The operator's name in result files; default: the case's.")] = "",
    device: Device = "cpu",
    seconds: Annotated[float, typer.Option(help="Time given to measuring.")] = 20.0,
    out: Annotated[Path | None, typer.Option(help="Append to this file of JSON lines.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Every way of doing it, side by side, verified."""
    from dataclasses import asdict

    from tilewright.measure.benchmark import append_results
    from tilewright.report.terminal import show_optimize
    from tilewright.targets import load_case
    from tilewright.verbs import bench_case

    case = load_case(target, inputs, training=training)
    wanted = [name.strip() for name in impl.split(",") if name.strip()]
    with _stages(quiet or as_json) as tell:
        program, rows = bench_case(
            case, suite=suite or case.name, impls=wanted, device=device, seconds=seconds, tell=tell
        )
    if out:
        append_results(out, rows)
    if as_json:
        for row in rows:
            print(json.dumps(asdict(row)))
    else:
        _show(show_optimize(program, rows, []))


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help="Any SQL over the run's tables; SHOW TABLES lists them.")],
    run: RunFile = None,
    as_json: AsJson = False,
) -> None:
    """Query the latest run (read-only)."""
    from tilewright.store.places import latest_run
    from tilewright.store.query import query as ask

    columns, rows = ask(run or latest_run(), query)
    if as_json:
        _print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    from rich.table import Table

    from tilewright.report.terminal import plain

    table = Table(*columns)
    for row in rows:
        table.add_row(*(plain(str(value)) for value in row))
    _show(table)


@app.command()
def report(
    run: RunFile = None,
    out: Annotated[Path | None, typer.Option(help="Where the page goes; default: beside the run.")] = None,
) -> None:
    """Write the page of the latest run."""
    from tilewright.report.page import write_page
    from tilewright.store.places import latest_run

    path = run or latest_run()
    print(f"page  {write_page(path, out or path.with_suffix('.html'))}")


def _show(renderable: Any) -> None:
    console = Console()
    Console(width=max(console.width, 120) if console.is_terminal else 160).print(renderable)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, default=str))


@contextmanager
def _working(what: str, quiet: bool) -> Iterator[None]:
    with _stages(quiet) as tell:
        tell(what)
        yield


@contextmanager
def _stages(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr that names the stage at hand; nothing where nobody watches."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as status:
        yield lambda stage: status.update(stage)


if __name__ == "__main__":
    main()
