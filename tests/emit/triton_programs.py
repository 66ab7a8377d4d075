"""Graphs run kernel by kernel through the Triton emitter: in its interpreter on the CPU, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.emit.triton import emit_triton
from tilewright.loops.lower import Lowered
from tilewright.passes.fusion import Region, fuse
from tilewright.passes.schedule import schedule
from tilewright.runtime.gpu import Launch, TritonKernel

Function = Callable[..., Any]


def graph_of(function: Function, *inputs: torch.Tensor) -> fx.Graph:
    """The ATen graph of a function at the shapes, dtypes and strides of `inputs`."""
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def nests_of(function: Function, *inputs: torch.Tensor) -> list[Lowered]:
    """The nests that fusion makes of a function."""
    return [region.lowered for region in fuse(graph_of(function, *inputs), "forward").regions]


def outputs_of(lowered: Lowered, device: torch.device) -> list[torch.Tensor]:
    """Uninitialised results of a nest, laid out as the graph says; filled, so that what is not written shows."""
    results = []
    for node in lowered.outputs:
        meta = node.meta["val"]
        empty = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)
        results.append(empty.fill_(torch.nan if meta.dtype.is_floating_point else 1))
    return results


def launch(
    lowered: Lowered, inputs: Sequence[torch.Tensor], device: torch.device, chosen: Launch | None = None
) -> list[torch.Tensor]:
    """One nest over `inputs` (in the order of its buffers); gives its results."""
    results = outputs_of(lowered, device)
    TritonKernel(lowered.nest, emit_triton(lowered.nest)).launch([*inputs, *results], chosen)
    return results


def run_graph(
    graph: fx.Graph, inputs: Sequence[torch.Tensor], choose: Callable[[Lowered], Launch | None] = lambda _: None
) -> tuple[list[Any], dict[fx.Node, str]]:
    """All results of a graph, its regions run as Triton kernels; and the kernel that made each value."""
    values: dict[fx.Node, Any] = dict(zip((n for n in graph.nodes if n.op == "placeholder"), inputs, strict=True))
    made: dict[fx.Node, str] = {}
    device = inputs[0].device
    for unit in schedule(graph, fuse(graph, "forward").regions):
        if isinstance(unit, Region):
            lowered = unit.lowered
            results = launch(lowered, [values[n] for n in lowered.inputs], device, choose(lowered))
            values.update(zip(lowered.outputs, results, strict=True))
            made.update(dict.fromkeys(lowered.outputs, unit.name))
        else:
            args, kwargs = fx.node.map_arg((unit.args, unit.kwargs), values.__getitem__)
            values[unit] = unit.target(*args, **kwargs)  # type: ignore[operator]
    results = graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    return [values[n] if isinstance(n, fx.Node) else n for n in results], made
