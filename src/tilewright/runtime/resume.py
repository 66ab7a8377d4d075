"""Ends a call as PyTorch runs it, from the step on that gave something else than planned: nothing is drawn, written or
sent twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from tilewright.graph.calls import closure
from tilewright.passes.fusion import Region
from tilewright.passes.schedule import Unit
from tilewright.runtime.executable import Resume, Slots


def resumption(graph: fx.Graph, units: Sequence[Unit], places: Mapping[fx.Node, int]) -> Resume:
    """A function that computes what is left of a call: `units` from a position on, operator by operator. `places` has
    the slots of the graph's values."""

    def resume(position: int, slots: Slots) -> Sequence[Any]:
        known = {n: slots[i] for n, i in places.items() if slots[i] is not None or n.op == "placeholder"}
        results = graph.output_node()
        left = [n for unit in units[position:] for n in (unit.lowered.outputs if isinstance(unit, Region) else [unit])]
        # Kernels leave out views, and values that nothing else reads: compute these from what is there.
        needed = closure([*left, *results.all_input_nodes], lambda n: () if n in known else n.all_input_nodes)
        for node in graph.nodes:
            if node in needed and node not in known:
                known[node] = _computed(node, known)
        found: Sequence[Any] = map_arg(results.args[0], known.__getitem__)  # type: ignore[arg-type]
        return found

    return resume


def _computed(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return attrgetter(str(node.target))(node.graph.owning_module)
    target: Any = node.target
    return target(*map_arg(node.args, known.__getitem__), **map_arg(node.kwargs, known.__getitem__))
