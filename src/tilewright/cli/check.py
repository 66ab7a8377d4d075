"""`tilewright check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli import completion


def check(
    lesson: Annotated[
        str, typer.Argument(help="A lesson of docs/learn: softmax, gelu, ...", autocompletion=completion.lessons)
    ],
    file: Annotated[
        Path, typer.Argument(help="Predictions, one `name = number or formula` a line; or a .py with your operator.")
    ],
    language: Annotated[
        str,
        typer.Option(
            help="en or zh: the language of what is said of predictions.", autocompletion=completion.languages
        ),
    ] = "en",
) -> None:
    """Grade predictions or an operator of a lesson, in words."""
    from tilewright.bench.peers import example_module

    for line in example_module("lessons/check.py").check(lesson, file, language):
        print(line, flush=True)
