"""Compiled graphs as CUDA graphs: what PyTorch's trees of CUDA graphs (torch 2.11 to 2.13) are asked and told.

With `capture.py` the only file that touches PyTorch's private modules. The trees keep the memory, one pool for
forward and backward; copy inputs that are not static; record again where something lies elsewhere; end the life of
what the last step left; and move the generators on with each replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from tilewright.graph.capture import Boxed, Called


def written_inputs(module: fx.GraphModule) -> set[int]:
    """The inputs that a graph writes to, by their places."""
    from torch._dynamo.backends.cudagraphs import find_input_mutations

    return find_input_mutations(module.graph)


def unrecordable(module: fx.GraphModule) -> fx.Node | None:
    """The first operator that PyTorch knows not to work in a CUDA graph."""
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    return get_first_incompatible_cudagraph_node(module)


def recorded(run: Boxed, graph: Called, device: int, args: list[Any]) -> tuple[Boxed, Sequence[Any]]:
    """`run` as a CUDA graph, and its results for `args`, which are emptied.

    `run` must have been called with such arguments before. The trees would call it once more themselves, in their
    memory, where what a kernel allocates once and keeps would be overwritten; so they are told that they have.
    """
    from torch._inductor import config
    from torch._inductor.cudagraph_trees import cudagraphify_impl, get_manager
    from torch._inductor.cudagraph_utils import get_placeholder_info

    nodes = graph.module.graph
    results = nodes.output_node().args[0]
    assert isinstance(results, (list, tuple))
    model: Any = run
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


def records_here() -> bool:
    """Whether this thread can record CUDA graphs: the one that was the first to, and autograd's on its behalf."""
    from torch._inductor import cudagraph_trees

    name = "tree_manager_containers"
    return hasattr(cudagraph_trees.local, name) or torch._C._is_key_in_tls(name)


def end_forward(device: int) -> None:
    """Tell the trees of a backward that they do not run: what forward left may be overwritten from the next step on."""
    from torch._inductor.cudagraph_trees import get_manager

    if manager := get_manager(device, create_if_none_exists=False):
        manager.set_to_running_backward()
