"""Arguments and options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[str, typer.Argument(help="file.py:name or package.module:name: a case, module or function.")]
Inputs = Annotated[str | None, typer.Option(help='Inputs of a module or function: "bf16[B=16,S=1024,D=768]".')]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results only.")]
Training = Annotated[
    bool | None, typer.Option("--training/--inference", help="Forward and backward, or forward alone.")
]
RunFile = Annotated[Path | None, typer.Option("--run", help="A run; the latest unless one is named.")]
