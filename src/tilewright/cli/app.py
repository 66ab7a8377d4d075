"""The command and its verbs. Every failure has one message and a documented exit code."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tilewright import __version__
from tilewright.cli.bench import bench
from tilewright.cli.claims import claims
from tilewright.cli.diff import diff
from tilewright.cli.doctor import doctor
from tilewright.cli.explain import explain
from tilewright.cli.kernel import kernel
from tilewright.cli.optimize import optimize
from tilewright.cli.plan import plan
from tilewright.cli.profile import profile
from tilewright.cli.report import report
from tilewright.cli.sql import sql
from tilewright.cli.trace import trace
from tilewright.records.errors import TilewrightError, UsageError

# In the order in which help lists them.
VERBS = (doctor, explain, optimize, bench, kernel, profile, trace, sql, report, diff, claims)
INTERRUPTED = 130

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)
for verb in VERBS:
    app.command()(verb)
app.add_typer(plan)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"tilewright {__version__}")
        raise typer.Exit


@app.callback()
def tilewright(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """How far each operator of a PyTorch model is from the hardware's limit, and why; kernels that close the gap."""


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
