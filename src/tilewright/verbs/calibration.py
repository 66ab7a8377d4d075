"""Kernels and library calls of every kind, timed on this machine, for the model of their times (`cost/fit.py`).

Each program is compiled as a user's is, and its steps are timed in the order in which they run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tilewright.cost.fit import Timed, errors, fit

if TYPE_CHECKING:
    from tilewright.compile.recording import CompiledGraph


@dataclass(frozen=True)
class Program:
    """A function of tensors, which are drawn in these shapes; with gradients if `training`."""

    name: str
    function: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    training: bool = True
    without: str = ""
    """A kind of which other programs time enough."""


def calibrate(
    device: str | None = None, tell: Callable[[str], None] = lambda _: None
) -> Mapping[str, tuple[int, float, float]]:
    """Time kernels of every kind on `cpu`, `cuda` or `cuda:N` (default: the first GPU, if any), fit and keep.

    For each kind how many were timed, and the median and 95th percentile of the relative error of their predictions.
    Takes a minute or two. Raises CacheError where the coefficients cannot be kept.
    """
    import torch

    from tilewright.hardware.ceilings import keep_kernel_times
    from tilewright.hardware.profiles import local_profile
    from tilewright.verbs.calibration_programs import programs

    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    profile = local_profile(device=chosen)
    timed: list[Timed] = []
    for group, several in programs(chosen).items():
        tell(f"timing kernels: {group}")
        timed += timed_kernels(chosen, several)
    times = fit(timed, profile)
    keep_kernel_times(profile.name, times, [asdict(one) for one in timed])
    return errors(timed, replace(profile, kernel_times=times))


def timed_kernels(device: str, programs: Sequence[Program]) -> Iterator[Timed]:
    """The work of each step of these programs, and its time on `device`: bf16 on a GPU, fp32 on a CPU."""
    for program in programs:
        for graph in _compiled(device, program):
            yield from _timed(device, program, graph)


def _compiled(device: str, program: Program) -> list[CompiledGraph]:
    import torch

    from tilewright import backend
    from tilewright.pytorch.compiler import forget_compiled

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    inputs = [
        torch.randn(shape, device=device, dtype=dtype).requires_grad_(program.training) for shape in program.shapes
    ]
    # Hand-written kernels take part where a program calls them.
    options = {"hand_written": False}
    forget_compiled()
    with backend.recording() as record:
        compiled = torch.compile(
            program.function, backend=partial(backend.backend, options=options), dynamic=False, fullgraph=True
        )
        with torch.set_grad_enabled(program.training):
            compiled(*inputs)
    return record.graphs


def _timed(device: str, program: Program, graph: CompiledGraph) -> Iterator[Timed]:
    from tilewright.compile.launches import works
    from tilewright.runtime.stopwatch import example_inputs, time_in_place

    times = time_in_place(graph.executable, example_inputs(graph.plan.graph), device)
    for unit, work in works(graph.plan):
        time = times.get(unit.name)
        if time is not None and work is not None and work.kind != program.without:
            yield Timed(f"{program.name} {graph.plan.name} {unit.name}", work, time.us)
