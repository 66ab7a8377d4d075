"""`tilewright kernel`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright.cli import completion
from tilewright.cli.options import AsJson, Inputs, Quiet
from tilewright.cli.output import print_json, show, working
from tilewright.records.errors import UsageError

if TYPE_CHECKING:
    from tilewright.hardware.geometry import KernelView


def kernel(
    target: Annotated[
        str,
        typer.Argument(
            help="An operator (softmax, ...), file.py:kernel, file.cu:kernel, or a case with --impl.",
            autocompletion=completion.operators,
        ),
    ],
    sizes: Annotated[
        list[str] | None, typer.Argument(help="Sizes of an operator: 1000x512; several are allowed.")
    ] = None,
    impl: Annotated[str, typer.Option(help="The implementation of an operator or case; for matmul also cublas.")] = "",
    dtype: Annotated[
        str, typer.Option(help="bf16, fp32, ...; default: the operator's first.", autocompletion=completion.dtypes)
    ] = "",
    direction: Annotated[str, typer.Option(help="fwd, bwd or fwd+bwd.", autocompletion=completion.directions)] = "fwd",
    on: Annotated[
        str | None,
        typer.Option(
            help="An NVIDIA GPU of `explain --on`: compile for it, run nothing.", autocompletion=completion.devices
        ),
    ] = None,
    inputs: Inputs = None,
    launch: Annotated[str, typer.Option(help="The function of the file that launches the kernel.")] = "launch",
    grid: Annotated[str | None, typer.Option(help="Blocks, for file.cu:kernel: 63 or 63,1,1.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Threads per block, for file.cu:kernel.")] = None,
    source: Annotated[bool, typer.Option("--source", help="Print the kernels' source.")] = False,
    ptx: Annotated[bool, typer.Option("--ptx", help="Print their PTX.")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="Print their machine code.")] = False,
    page: Annotated[
        Path | None, typer.Option(help="Write a page that steps through the programs' tiles.", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show which program of a kernel computes which tile, waves, other tile sizes, registers, PTX and SASS."""
    from tilewright.anatomy.kernel_views import Request, kernel_views
    from tilewright.hardware.geometry import view_record

    texts = [name for name, wanted in (("source", source), ("ptx", ptx), ("sass", sass)) if wanted]
    if texts and (as_json or page):
        raise UsageError("--json and --page have the texts already; leave --source, --ptx and --sass out")
    asked = Request(target, tuple(sizes or ()), impl, dtype, direction, on, inputs, launch, grid, threads, bool(texts))
    with working("compiling and following programs", quiet or as_json):
        found = kernel_views(asked)
    if page is not None:
        from tilewright.report.tile_replay import write_replay

        print(f"page  {write_replay(found, page)}")
    elif as_json:
        print_json([{"subject": subject, "kernels": [view_record(view) for view in views]} for subject, views in found])
    else:
        for subject, views in found:
            _show(subject, views, texts)


def _show(subject: str, views: Sequence[KernelView], texts: Sequence[str]) -> None:
    """Each kernel's view, or only its `texts`."""
    from tilewright.report.geometry import show_kernel

    if texts:
        for view in views:
            print("\n".join(getattr(view.launch, name).rstrip() for name in texts))
        return
    print(f"[{subject}]\n")
    for view in views:
        show(show_kernel(view))
        print()
