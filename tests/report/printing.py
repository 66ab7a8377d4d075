"""Prints views as a terminal shows them."""

import io

from rich.console import Console, RenderableType


def printed(view: RenderableType, width: int = 200, colours: bool = False) -> str:
    """The text of `view`, `width` characters wide; with `colours`, as on a terminal that has some."""
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=colours, color_system="standard" if colours else None).print(view)
    return out.getvalue()
