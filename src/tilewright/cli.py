"""The command line: wiring only. Every failure has one message and a documented exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tilewright.records.errors import TilewrightError, UsageError, VerificationError

if TYPE_CHECKING:
    from tilewright.records.case import Case
    from tilewright.records.choice import Choice
    from tilewright.records.suite import Suite

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
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: the first GPU, if any.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the report to this file, as JSON.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """The machine, its ceilings measured and from the datasheet."""
    from tilewright.hardware.profiles import local_ceilings
    from tilewright.hardware.summary import machine_record, machine_report

    with _working("measuring ceilings", quiet or as_json):
        machine, ceilings = local_ceilings(refresh, device)
    record = machine_record(machine, ceilings)
    if out:
        from tilewright.measure.results import write_atomically

        write_atomically(out, json.dumps(record, indent=1, ensure_ascii=False) + "\n", mode=0o644)
    if as_json:
        _print_json(record)
        return
    report = machine_report(machine, ceilings)
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
    target: Annotated[str, typer.Argument(help="An operator (softmax, layer_norm, ...) or file.py:name.")],
    inputs: Inputs = None,
    training: Training = None,
    impl: Annotated[str, typer.Option(help="Implementations, comma-separated; default: all.")] = "",
    shapes: Annotated[str, typer.Option(help="Sizes, comma-separated: 100x5000,65536x8192.")] = "",
    dtype: Annotated[str, typer.Option(help="bf16,fp32,...; default: the operator's.")] = "",
    direction: Annotated[str, typer.Option(help="fwd,bwd,fwd+bwd; default: the operator's.")] = "",
    sweep: Annotated[str, typer.Option(help="A named series of sizes of the operator.")] = "",
    shard: Annotated[str, typer.Option(help="I/N: every N-th race from the I-th on, for long runs.")] = "1/1",
    suite: Annotated[str, typer.Option(help="The name in result files; default: the operator's or case's.")] = "",
    device: Device = "cpu",
    seconds: Annotated[float | None, typer.Option(help="Time given to measuring; an operator: to each race.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw an operator's rates over sizes: .png, .svg, .html.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON lines; a row replaces the older one of its kind.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Every way of doing it, side by side, verified."""
    from tilewright.bench import suite_named
    from tilewright.records.choice import Choice

    choice = Choice.parse(impl=impl, shapes=shapes, dtype=dtype, direction=direction, sweep=sweep, shard=shard)
    operator = suite_named(target)
    own = {"--inputs": inputs, "--training": training, "--suite": suite}
    sized = {"--shapes": shapes, "--dtype": dtype, "--direction": direction, "--sweep": sweep, "--plot": plot}
    _refuse(own if operator else sized, f"{target} is {'an operator with its own inputs' if operator else 'a case'}")
    if operator:
        _bench_operator(operator, choice, device, seconds or 3.0, out, plot, as_json, quiet)
        return
    from tilewright.targets import load_case

    case = load_case(target, inputs, training=training)
    _bench_case(case, choice, suite, device, seconds or 20.0, out, as_json, quiet)


def _refuse(options: Mapping[str, object], why: str) -> None:
    """UsageError for options that were given and mean nothing here."""
    given = [name for name, value in options.items() if value not in (None, "")]
    if given:
        raise UsageError(f"{why}: leave {', '.join(given)} out")


def _bench_operator(
    suite: Suite,
    choice: Choice,
    device: str,
    seconds: float,
    out: Path | None,
    plot: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    from tilewright.bench import Heat, bench_suite, faults, remarks
    from tilewright.measure.results import append_results, as_line
    from tilewright.report import bench_plot
    from tilewright.report.bench_table import show_race

    if plot:
        bench_plot.check(plot)

    def done(heat: Heat) -> None:
        # Kept as it ends: what a long run has measured survives its interruption.
        if out:
            append_results(out, heat.rows, gone=heat.refused)
        if as_json:
            for row in heat.rows:
                print(as_line(row))
        else:
            _show(show_race(heat.title, heat.rows, remarks(heat), heat.unit))

    with _stages(quiet or as_json) as tell:
        run = bench_suite(suite, choice, device=device, seconds=seconds, tell=tell, done=done)
    rows = [row for heat in run for row in heat.rows]
    if plot and rows:
        bench_plot.draw(rows, run[0].unit, plot)
    faulty = [line for heat in run for line in faults(heat)]
    if faulty:
        raise VerificationError("\n".join(faulty))


def _bench_case(
    case: Case,
    choice: Choice,
    suite: str,
    device: str,
    seconds: float,
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    from tilewright.measure.results import append_results, as_line
    from tilewright.report.terminal import show_optimize
    from tilewright.verbs import bench_case

    with _stages(quiet or as_json) as tell:
        program, rows = bench_case(
            case, suite=suite or case.name, impls=choice.impls, device=device, seconds=seconds, tell=tell
        )
    if out:
        append_results(out, rows)
    if as_json:
        for row in rows:
            print(as_line(row))
    else:
        _show(show_optimize(program, rows, []))


@app.command()
def kernel(
    target: Annotated[
        str, typer.Argument(help="An operator (softmax, ...), file.py:kernel of Triton, or a case with --impl.")
    ],
    sizes: Annotated[list[str] | None, typer.Argument(help="Of an operator: 1000x512, several if need be.")] = None,
    impl: Annotated[str, typer.Option(help="An operator's or case's implementation; matmul: cublas too.")] = "",
    dtype: Annotated[str, typer.Option(help="bf16, fp32, ...; default: the operator's first.")] = "",
    direction: Annotated[str, typer.Option(help="fwd, bwd or fwd+bwd.")] = "fwd",
    on: Annotated[str | None, typer.Option(help="h200, a100, rtx4090, 2080ti: compile for it, run nothing.")] = None,
    inputs: Inputs = None,
    launch: Annotated[str, typer.Option(help="The function of the file that launches the kernel.")] = "launch",
    signature: Annotated[
        str | None, typer.Option(help='The kernel\'s arguments: "bf16[1000,512], fp32[512], 1000, BLOCK=16".')
    ] = None,
    grid: Annotated[str | None, typer.Option(help="Programs, with --signature: 63 or 63,1,1.")] = None,
    threads: Annotated[int | None, typer.Option(help="Of a block, with --grid, for file.cu:kernel.")] = None,
    source: Annotated[bool, typer.Option(help="Print the kernels' source.")] = False,
    ptx: Annotated[bool, typer.Option(help="Print their PTX.")] = False,
    sass: Annotated[bool, typer.Option(help="Print their machine code.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Source, PTX, SASS, registers, waves; which program owns what, and what other tiles would do."""
    from tilewright.anatomy.look import Request, look
    from tilewright.hardware.geometry import view_record
    from tilewright.report.geometry import show_kernel

    texts = [name for name, wanted in (("source", source), ("ptx", ptx), ("sass", sass)) if wanted]
    if texts and as_json:
        raise UsageError("--json has every text already; leave --source, --ptx and --sass out")
    asked = Request(
        target, tuple(sizes or ()), impl, dtype, direction, on, inputs, launch, signature, grid, threads, bool(texts)
    )
    with _working("compiling and following programs", quiet or as_json):
        found = look(asked)
    if as_json:
        _print_json(
            [{"subject": subject, "kernels": [view_record(view) for view in views]} for subject, views in found]
        )
        return
    for subject, views in found:
        if texts:
            for view in views:
                print("\n".join(getattr(view.launch, name).rstrip() for name in texts))
            continue
        print(f"[{subject}]\n")
        for view in views:
            _show(show_kernel(view))
            print()


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
