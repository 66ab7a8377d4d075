"""Arguments and options that several verbs share."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli import completion
from tilewright.records.errors import UsageError

Target = Annotated[str, typer.Argument(help="file.py:name or package.module:name: a case, module or function.")]
Inputs = Annotated[
    str | None,
    typer.Option(
        help='Inputs of a module or function: "bf16[B=16,S=1024,D=768]", "ids=i64[B=4,S=128]<32000, mask=bool[B,S]". '
        "Integers without a range are 0 or 1. docs/inputs.md has the whole grammar."
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda or cuda:N; default: the first GPU, if any.", autocompletion=completion.devices_here),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results only.")]
Training = Annotated[
    bool | None,
    typer.Option(
        "--training/--inference", help="Forward and backward, or only forward; default: inference, or a case's own."
    ),
]
RunFile = Annotated[
    Path | None, typer.Option("--run", help="A run's file; default: the latest run.", autocompletion=completion.runs)
]


def command_line() -> str:
    """The command as it was typed, to run it again."""
    return shlex.join(["tilewright", *sys.argv[1:]])


def time_given(seconds: float | None) -> float | None:
    """The callback of `--seconds`; UsageError unless it is positive and finite. click's ranges let NaN pass."""
    if seconds is not None and not 0 < seconds < math.inf:
        raise UsageError(f"--seconds {seconds:g} is not a time to measure for: give a number above 0")
    return seconds


def device_here(device: str | None) -> str:
    """`device`, by default the first GPU or else the CPU; UsageError if PyTorch sees no such device."""
    import torch

    gpus = torch.cuda.device_count()
    if device is None:
        return "cuda" if gpus else "cpu"
    kind, _, number = device.partition(":")
    if device != "cpu" and not (kind == "cuda" and (number or "0").isdecimal() and int(number or 0) < gpus):
        raise UsageError(f"no device {device!r} here, only cpu and {gpus or 'no'} CUDA devices")
    return device
