"""Captures compiled graphs with PyTorch's CUDA graph trees (private modules of torch 2.11 to 2.13).

The trees own one memory pool for forward and backward, copy inputs that are not static, capture again if an address
changes, invalidate the results of the previous step, and advance the generators with each replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from tilewright.capture.aot import Boxed, CallableGraph
from tilewright.graph.views import maker, written


def written_inputs(module: fx.GraphModule) -> set[int]:
    """Indices of the inputs that a graph writes to."""
    inputs = {node: place for place, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    makers = (maker(operand) for node in module.graph.nodes if node.op == "call_function" for operand in written(node))
    return {inputs[node] for node in makers if node in inputs}


def unrecordable(module: fx.GraphModule) -> fx.Node | None:
    """The first operator that PyTorch excludes from CUDA graphs."""
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    return get_first_incompatible_cudagraph_node(module)


def recorded(run: Boxed, graph: CallableGraph, device: int, args: list[Any]) -> tuple[Boxed, Sequence[Any]]:
    """Capture `run` as a CUDA graph; returns the graph and its results for `args`, which are emptied.

    `run` must have been called with such arguments before. The trees' own warm-up call is skipped: it would run in
    their pool, where buffers that a kernel allocates once and keeps would be overwritten.
    """
    from torch._inductor import config
    from torch._inductor.cudagraph_trees import cudagraphify_impl, get_manager
    from torch._inductor.cudagraph_utils import get_placeholder_info

    nodes = graph.module.graph
    results = nodes.output_node().args[0]
    assert isinstance(results, (list, tuple))
    model: Any = _resolved(run) if any(map(_is_unresolved, nodes.output_node().all_input_nodes)) else run
    replay: Any = cudagraphify_impl(
        model,
        args,
        graph.static,
        device_index=device,
        is_backward=graph.kind == "backward",
        is_inference=graph.kind == "inference",
        stack_traces=[n.stack_trace if isinstance(n, fx.Node) else None for n in results],
        constants=tuple(attrgetter(str(n.target))(graph.module) for n in nodes.find_nodes(op="get_attr")),
        placeholders=tuple(get_placeholder_info(nodes)),
        mutated_input_idxs=tuple(written_inputs(graph.module)),
    )
    with config.patch({"triton.skip_cudagraph_warmup": True}):
        first = replay(args)
    manager = get_manager(device)
    assert manager is not None
    manager.warmed_up_functions.update(manager.ids_to_funcs)
    return replay, first


def _is_unresolved(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg())


def _resolved(run: Boxed) -> Boxed:
    """`run`, with results that are not shown conjugated or negated: the trees rebuild results without those bits."""

    def resolved(args: list[Any]) -> Sequence[Any]:
        return [x.resolve_conj().resolve_neg() if isinstance(x, torch.Tensor) else x for x in run(args)]

    return resolved


def records_here() -> bool:
    """Whether this thread can capture CUDA graphs: the first one that did, and autograd's threads for it."""
    from torch._inductor import cudagraph_trees

    name = "tree_manager_containers"
    return hasattr(cudagraph_trees.local, name) or torch._C._is_key_in_tls(name)


def end_forward(device: int) -> None:
    """Tell the trees that a backward runs without a graph, so that the next step may overwrite forward's results."""
    from torch._inductor.cudagraph_trees import get_manager

    if manager := get_manager(device, create_if_none_exists=False):
        manager.set_to_running_backward()
