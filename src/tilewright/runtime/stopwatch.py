"""The time of each step of an executable, and of each operator of a graph as eager runs it."""

from __future__ import annotations

import time
from collections import defaultdict
from statistics import median
from typing import Any

import torch
from torch import fx

from tilewright.runtime.executable import Executable, Slots

REPEATS = 9


def time_steps(executable: Executable, inputs: list[Any]) -> dict[str, float]:
    """Median microseconds of every step by its name, over a few runs on the same inputs (CPU)."""
    laps: dict[str, list[float]] = defaultdict(list)
    for _ in range(REPEATS):
        slots: Slots = [None] * executable.slots
        for (slot, _spec), value in zip(executable.inputs, inputs, strict=True):
            slots[slot] = value
        for step in executable.steps:
            start = time.perf_counter_ns()
            step.run(slots)
            laps[step.name].append((time.perf_counter_ns() - start) / 1e3)
            for index in step.frees:
                slots[index] = None
    return {name: median(values) for name, values in laps.items()}


class _Timed(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.laps: dict[str, list[float]] = defaultdict(list)

    def run_node(self, n: fx.Node) -> Any:
        start = time.perf_counter_ns()
        result = super().run_node(n)
        if n.op == "call_function":
            self.laps[n.name].append((time.perf_counter_ns() - start) / 1e3)
        return result


def time_operators(graph: fx.Graph, inputs: list[Any]) -> dict[str, float]:
    """Median microseconds of every operator of `graph` run one by one as PyTorch runs them (CPU)."""
    timed = _Timed(fx.GraphModule(torch.nn.Module(), graph))
    with torch.no_grad():
        for _ in range(REPEATS):
            timed.run(*inputs)
    return {name: median(values) for name, values in timed.laps.items()}


def example_inputs(graph: fx.Graph, seed: int = 0) -> list[Any]:
    """Random tensors that lie as the placeholders of `graph` say; numbers as captured."""
    generator = torch.Generator().manual_seed(seed)
    return [_example(n.meta.get("val"), generator) for n in graph.nodes if n.op == "placeholder"]


def _example(meta: Any, generator: torch.Generator) -> Any:
    if not isinstance(meta, torch.Tensor):
        return meta
    tensor = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
    if meta.dtype.is_floating_point:
        return tensor.normal_(generator=generator)
    return tensor.random_(0, 2, generator=generator)
