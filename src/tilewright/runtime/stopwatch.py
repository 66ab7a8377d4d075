"""Times each step of an executable, and each operator of a graph run eagerly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from math import prod
from statistics import median
from time import monotonic
from typing import Any

import torch
from torch import fx

from tilewright.kernels.dropout_add.stream import example_stream, keep
from tilewright.measure.timing.device_records import CallTime, kernel_times
from tilewright.measure.timing.stopwatch import Stopwatch, stopwatch_for
from tilewright.records.progress import tell
from tilewright.runtime.executable import Executable, Slots, Step, layout_of

REPEATS = 9
FEWEST = 3
ENOUGH_S = 3.0
"""After so long `FEWEST` repeats are enough: what takes a third of a second and more varies little."""


def _repeats(what: str) -> Iterator[int]:
    """As many as `REPEATS`, fewer of long runs."""
    began = monotonic()
    for done in range(REPEATS):
        if done >= FEWEST and monotonic() - began > ENOUGH_S:
            break
        yield done
        tell(what, done + 1)


def time_in_place(executable: Executable, inputs: list[Any], device: str = "cpu") -> dict[str, CallTime]:
    """The time of every step, by name, in a run of the whole program, so that caches hold what earlier steps left.

    On a GPU the time of a step's kernels alone, without steps that launch none; on a CPU the median of a few runs.
    """
    slots: Slots = []

    def run(step: Step) -> None:
        if step is executable.steps[0]:
            slots[:] = [None] * executable.slots
            for (slot, _spec), value in zip(executable.inputs, inputs, strict=True):
                slots[slot] = value
        step.run(slots)
        for index in step.frees:
            slots[index] = None

    if torch.device(device).type != "cuda":
        laps: dict[str, list[float]] = defaultdict(list)
        watch = stopwatch_for(device)
        for _ in _repeats("runs timed kernel by kernel"):
            for step in executable.steps:
                laps[step.name].append(watch.time(partial(run, step)).us)
        return {name: CallTime(median(values)) for name, values in laps.items()}
    with torch.cuda.device(device):
        times = kernel_times([partial(run, step) for step in executable.steps])
    named = zip(executable.steps, times, strict=True)
    return {step.name: time for step, time in named if time is not None}


class _Timed(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, watch: Stopwatch) -> None:
        super().__init__(module)
        self.watch = watch
        self.laps: dict[str, list[float]] = defaultdict(list)

    def run_node(self, n: fx.Node) -> Any:
        results: list[Any] = []
        run = super().run_node
        lap = self.watch.time(lambda: results.append(run(n)))
        if n.op == "call_function":
            self.laps[n.name].append(lap.us)
        return results[0]


def time_operators(graph: fx.Graph, inputs: list[Any], device: str = "cpu") -> dict[str, float]:
    """Median microseconds of every operator of `graph`, run eagerly one by one on `device`."""
    timed = _Timed(fx.GraphModule(graph.owning_module or torch.nn.Module(), graph), stopwatch_for(device))
    with torch.no_grad():
        for _ in _repeats("eager runs timed operator by operator"):
            timed.run(*inputs)
    return {name: median(values) for name, values in timed.laps.items()}


def example_inputs(graph: fx.Graph) -> list[Any]:
    """Values for the placeholders of `graph`: random tensors, the captured numbers, valid states of PyTorch's
    generator."""
    generators: dict[torch.device, torch.Generator] = {}
    nodes = graph.find_nodes(op="placeholder")
    tensors = [value for n in nodes if isinstance(value := n.meta.get("val"), torch.Tensor)]
    # Indices of a table with one row are 0.
    high = 1 if any(1 in value.shape for value in tensors) else 2
    return [
        example_stream(elements) if (elements := _drawn(n)) else random_like(n.meta.get("val"), generators, high)
        for n in nodes
    ]


def _drawn(node: fx.Node) -> int:
    """If a placeholder is a saved generator state, how many numbers are drawn again from it; else 0.

    The state must be valid, since kernels compute addresses from it.
    """
    kept = [user for user in node.users if user.target is keep]
    return max((prod(user.args[1]) for user in kept), default=0)  # type: ignore[arg-type]


def random_like(meta: Any, generators: dict[torch.device, torch.Generator], high: int = 2) -> Any:
    """A random tensor of the same layout and device, of integers below `high`; any other value itself. A missing
    generator of a device is added to `generators`."""
    if not isinstance(meta, torch.Tensor):
        return meta
    if meta.device not in generators:
        generators[meta.device] = torch.Generator(meta.device).manual_seed(0)
    generator, layout = generators[meta.device], layout_of(meta)
    # Elements that share memory, as those of an expanded tensor do, are drawn once.
    if meta.dtype.is_floating_point or meta.dtype.is_complex:
        # No generator draws 8-bit floats.
        drawn = meta.dtype if meta.dtype.itemsize > 1 else torch.float32
        storage = torch.randn(layout.extent, dtype=drawn, device=meta.device, generator=generator).to(meta.dtype)
    else:
        storage = torch.randint(high, (layout.extent,), device=meta.device, generator=generator).to(meta.dtype)
    return storage.as_strided(layout.shape, layout.strides)
