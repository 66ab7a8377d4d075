"""`tilewright profile`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright.cli import completion
from tilewright.cli.options import AsJson, Device, Inputs, Quiet, Training, command_line, device_here
from tilewright.cli.output import show, stages
from tilewright.records.errors import UsageError

if TYPE_CHECKING:
    from tilewright.profiling.saved import SavedProfile


Words = Annotated[
    list[str], typer.Argument(metavar="TARGET | -- COMMAND", help="file.py:name, or after --: python train.py ...")
]
Impl = Annotated[
    str,
    typer.Option(
        help="How a target runs: eager, inductor or tilewright.",
        autocompletion=completion.offering(("eager", "inductor", "tilewright")),
    ),
]
Optimizer = Annotated[
    str,
    typer.Option(
        help="The optimizer that ends each step of a target: adamw, adam or sgd.",
        autocompletion=completion.offering(("adamw", "adam", "sgd")),
    ),
]
Wait = Annotated[int, typer.Option(min=0, help="First steps, without the profiler; they are timed.")]
Warmup = Annotated[
    int, typer.Option(min=0, help="Steps recorded to count events; on a GPU, operators are those of the last one.")
]
Active = Annotated[int, typer.Option(min=1, help="Steps to keep.")]
Events = Annotated[int, typer.Option(min=1, help="The largest number of events; it bounds the memory.")]
Shapes = Annotated[bool, typer.Option(help="Record the shapes of operands.")]
Stacks = Annotated[bool, typer.Option(help="Record Python's call stacks.")]
Memory = Annotated[bool, typer.Option(help="Record allocations.")]
Layers = Annotated[bool, typer.Option(help="Record a range for each layer of a model.")]
Light = Annotated[
    bool, typer.Option(help="On a GPU, record the kept steps without operators, which come from the warm-up.")
]
Timed = Annotated[
    float, typer.Option(min=0, help="Seconds of steps timed at last without the profiler; `diff` compares them.")
]
Whole = Annotated[bool, typer.Option("--whole", help="Record from the start, also without steps.")]
Stop = Annotated[bool, typer.Option("--stop", help="End the program when its steps are recorded.")]
Nvtx = Annotated[bool, typer.Option("--nvtx", help="NVTX ranges for Nsight Systems; record nothing here.")]


def profile(
    words: Words,
    inputs: Inputs = None,
    training: Training = None,
    impl: Impl = "eager",
    optimizer: Optimizer = "",
    device: Device = None,
    wait: Wait = 5,
    warmup: Warmup = 2,
    active: Active = 3,
    events: Events = 200_000,
    shapes: Shapes = True,
    stacks: Stacks = True,
    memory: Memory = True,
    layers: Layers = True,
    light: Light = True,
    timed: Timed = 2.0,
    whole: Whole = False,
    stop: Stop = False,
    nvtx: Nvtx = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Record a case, or a program and all its ranks: operators, timeline, memory; writes a run and a page."""
    from tilewright.case_names import load_case
    from tilewright.measure.recording.plan import Detail, RecordingPlan
    from tilewright.profiling.program import measure_missing_ceilings, profile_program
    from tilewright.profiling.steps import profile_case
    from tilewright.report.page import write_page

    detail = Detail(shapes, stacks, memory)
    plan = RecordingPlan(wait, warmup, active, events, detail, layers, whole, nvtx, light, timed)
    command, output = command_line(), _Output(as_json)

    with stages(quiet or as_json) as tell:
        if len(words) == 1 and ":" in words[0]:
            if stop:
                raise UsageError("--stop is for a command; a target ends by itself")
            where = device_here(device)
            # Only a step that trains ends with an optimizer.
            case = load_case(words[0], inputs, training=True if optimizer and training is None else training)
            done = profile_case(case, plan, impl=impl, optimizer=optimizer, device=where, command=command, tell=tell)
        else:
            measure_missing_ceilings(tell)
            done = profile_program(words, plan, stop=stop, command=command, tell=tell, early=output.early)
        if done is None:
            print("the ranges went to Nsight Systems; load its SQLite export with `tilewright trace`")
            return
        if not output.shown:
            tell("writing the page")
            write_page(done.run, done.run.with_suffix(".html"))
    if not output.shown:
        output.present(done)
    if done.exit_code:
        print(f"tilewright: {' '.join(words)} ended with exit code {done.exit_code}", file=sys.stderr)
        raise typer.Exit(done.exit_code)


class _Output:
    """Shows a profile once: when its steps are recorded, though the program may run on, or at the end."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.shown = False

    def present(self, done: SavedProfile) -> None:
        from tilewright.report.profile import profile_json

        self.shown = True
        if self.as_json:
            print(profile_json(done.table, done.recordings, done.run), flush=True)
            return
        show(done)
        print(f"run   {done.run}")
        print(f"page  {done.run.with_suffix('.html')}", flush=True)

    def early(self, done: SavedProfile) -> None:
        from tilewright.report.page import write_page

        write_page(done.run, done.run.with_suffix(".html"))
        self.present(done)
        print(
            "tilewright: its steps are recorded; the program runs on (--stop ends it here)", file=sys.stderr, flush=True
        )
