"""The command and its verbs. Every failure has one message and a documented exit code."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer

from tilewright import __version__
from tilewright.cli.bench import bench
from tilewright.cli.cases import bisect, explain, optimize
from tilewright.cli.claims import check, claims
from tilewright.cli.doctor import doctor
from tilewright.cli.failures import INTERRUPTED, message_of
from tilewright.cli.kernel import kernel
from tilewright.cli.plan import plan
from tilewright.cli.profile import profile
from tilewright.cli.runs import diff, report, sql, trace, whatif

# In the order in which help lists them.
VERBS = (doctor, explain, optimize, bench, kernel, profile, trace, sql, report, diff, whatif, bisect, claims, check)

# An example of each verb, which its help ends with.
EXAMPLES = {
    doctor: "tilewright doctor --refresh",
    explain: "tilewright explain examples/naive_softmax.py:softmax --on h200",
    optimize: 'tilewright optimize model.py:net --inputs "f32[B=16,S=256,D=256]"',
    bench: "tilewright bench softmax --shapes 100x5000 --impl tilewright,torch,inductor",
    kernel: "tilewright kernel weighted_sum 1000x512 --impl tilewright-16x64 --on h200",
    profile: "tilewright profile -- python train.py",
    trace: "tilewright trace trace.json.gz",
    sql: 'tilewright sql "SELECT operator, source, ms_per_step FROM what_you_would_win LIMIT 5"',
    report: "tilewright report --flame flame.svg",
    diff: "tilewright diff before.duckdb after.duckdb",
    whatif: "tilewright whatif run.duckdb floor:aten::gelu graph batch:2",
    bisect: 'tilewright bisect model.py:net --inputs "f32[B=16,S=256,D=256]"',
    claims: "tilewright claims --only H5,V*",
    check: "tilewright check softmax predictions.txt",
}
FIRST = """\
tilewright: what is slow in a PyTorch model, why, and kernels that close the gap.

Begin with one of these:

  tilewright doctor                        once: what this machine can do
  tilewright profile -- python train.py    where the time of your program goes, and what to do
  tilewright explain file.py:model --inputs "bf16[B=16,S=1024,D=768]" --on h200
                                           what a model must cost there; runs nothing, needs no GPU
  tilewright optimize file.py:model --inputs "f32[B=16,S=256,D=256]"
                                           the model fused, verified and timed beside eager and Inductor

tilewright --help lists all verbs, tilewright VERB --help has an example of each."""

app = typer.Typer(
    epilog="Runs are in $TILEWRIGHT_HOME (default ~/.local/share/tilewright), kernels in $TILEWRIGHT_CACHE (default "
    "~/.cache/tilewright). docs/environment.md has every variable, docs/exit_codes.md every exit code.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in VERBS:
    app.command(epilog=f"Example: {EXAMPLES[verb]}")(verb)
app.add_typer(plan)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"tilewright {__version__}")
        raise typer.Exit


@app.callback()
def tilewright(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """How far each operator of a PyTorch model is from the hardware's limit, and why; kernels that close the gap."""
    if context.invoked_subcommand is None:
        print(FIRST)
        raise typer.Exit(2)


def main() -> None:
    """Entry point of the `tilewright` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # An arrow or a µ that the encoding lacks is a `?`.
            stream.reconfigure(errors="replace")
    try:
        # What typer ends by itself (help, and in some versions Ctrl-C) comes back as an exit code.
        ended = app(standalone_mode=False)
        if ended == INTERRUPTED:
            raise KeyboardInterrupt
        sys.stdout.flush()
    except typer.Exit as done:
        ended = done.exit_code
    except BaseException as error:
        # Rich makes an exit of it.
        if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
            # Python flushes the stream once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        message, ended = message_of(error)
        # Without a command the help was printed, and its error has no text.
        if message:
            print(f"tilewright: {message}", file=sys.stderr)
    sys.exit(ended)
