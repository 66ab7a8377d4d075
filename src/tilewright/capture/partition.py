"""The cut of a joint graph into forward and backward (private modules of torch 2.11 to 2.13)."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from tilewright.graph.calls import closure
from tilewright.graph.undefined import is_tangent
from tilewright.graph.views import maker

Saver = Callable[[fx.Graph, Sequence[fx.Node], set[fx.Node]], Sequence[fx.Node]]


def cut(joint: fx.GraphModule, num_fwd_outputs: int, saver: Saver) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partition a joint graph into forward and backward; `saver` chooses which forward values are saved."""
    from torch._functorch.partitioners import _extract_fwd_bwd_modules

    graph = joint.graph
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    tangents = {n for n in inputs if is_tangent(n)}
    results = graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    _mark_overwritten(graph, inputs)
    forward_results, backward_results = (
        [n for n in part if isinstance(n, fx.Node)] for part in (results[:num_fwd_outputs], results[num_fwd_outputs:])
    )
    # Forward computes only what its results need; eager computes the rest in backward too.
    forward = closure({*forward_results, *inputs} - tangents, lambda n: n.all_input_nodes)
    forward |= {user for n in forward for user in n.users if user.target is operator.getitem}
    for node in filter(_acts, graph.nodes):
        in_backward = node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
        if not in_backward and not closure([node], lambda n: n.all_input_nodes) & tangents:
            # Backward has the operands, too, and would check them, or draw, again.
            node.meta["partitioner_tag"] = "must_be_in_forward"
    backward = closure(set(backward_results), lambda n: n.all_input_nodes) - forward
    needed = [n for n in graph.nodes if n in forward and (n in backward_results or backward & n.users.keys())]
    kept = list(saver(graph, needed, forward))
    needed_again = closure(set(backward_results) - set(kept), lambda n: set(n.all_input_nodes) - set(kept))
    # Sizes of the views that backward makes again.
    kept += [n for n in graph.nodes if n in forward & needed_again and isinstance(n.meta.get("val"), _SYMBOLS)]
    shown = set(map(maker, forward_results))
    for node in kept:
        # Operators of others may give memory that they keep.
        is_ours = str(maker(node).target).startswith(("aten.", "tilewright."))
        node.meta[HIDDEN] = is_ours and maker(node) not in shown
    symbolic = [n for n in kept if isinstance(n.meta.get("val"), _SYMBOLS)]
    opaque = [n for n in kept if n not in symbolic and not isinstance(n.meta.get("val"), torch.Tensor)]
    values = [n for n in kept if n not in symbolic and n not in opaque]
    # PyTorch 2.11 takes opaque values (device meshes, process groups) among the tensors and sorts them out itself.
    apart = "saved_opaque_nodes" in inspect.signature(_extract_fwd_bwd_modules).parameters
    extra: dict[str, Any] = {"saved_opaque_nodes": opaque} if apart else {}
    modules: tuple[fx.GraphModule, fx.GraphModule] = _extract_fwd_bwd_modules(
        joint,
        saved_values=values if apart else values + opaque,
        saved_sym_nodes=symbolic,
        num_fwd_outputs=num_fwd_outputs,
        **extra,
    )
    return modules


def _acts(node: fx.Node) -> bool:
    """Whether a call that nothing reads has an effect: it checks its operand, or draws from the generator."""
    return node.target is torch.ops.aten._assert_async.msg or draws(node)


def draws(node: fx.Node) -> bool:
    """Whether a call draws from a generator."""
    if isinstance(node.target, FunctionType):
        return node.is_impure()
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
"""Classes of a saved number."""


HIDDEN = "hidden"
"""Metadata key: whether forward allocates the memory of this value for backward alone."""
OVERWRITTEN = "overwritten"
"""Metadata key: the forward call writes to this input, so backward cannot recompute from its old value."""


def _mark_overwritten(graph: fx.Graph, inputs: Sequence[fx.Node]) -> None:
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    descriptions = graph.output_node().meta.get("desc", ())
    after_the_call = [d.mutated_input for d in descriptions if isinstance(d, InputMutationAOTOutput)]
    for node in inputs:
        in_the_graph = any(u.target is torch.ops.aten.copy_.default and u.args[0] is node for u in node.users)
        node.meta[OVERWRITTEN] = in_the_graph or node.meta.get("desc") in after_the_call
