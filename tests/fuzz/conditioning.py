"""Which programs the contract can judge.

Eager and float64 alone tell; no result of a compiled program has a say in it. `measure/truth/conditioning.py` sees to
numbers that cancel. What is left are decisions that a correct implementation might have taken otherwise than eager:

    x > x.sum()                         one unit more or less in the sum tips a comparison over
    F.layer_norm(x[:, :1], (1,)).any()  as does an operator that rounds its result alone: of one element it gives 0
    ((x * 0.3).sin() @ y).argmax(0)     in 16 bits: what a product reads is rounded as eager rounds it, or wider; the
                                        contract has eager's rounding back to the last product only
    F.elu(x) of NaN                     the gradient is NaN in some elements of eager's and the incoming one in others
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from tilewright.measure.truth.conditioning import EXACT, FINE, Decisions, Rounded, behind, operator_name, run
from tilewright.measure.truth.reference import copies
from tilewright.measure.truth.verify import joint_graph, run_eager

NAN_BY_PLACE = frozenset(f"{name}_backward" for name in ("elu", "hardtanh", "hardshrink", "softshrink", "hardswish"))
"""Gradients at NaN that are one number in PyTorch's vectors for CPUs and another in the elements after the last."""
PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward"})


def unverified(function: Callable[..., Any], inputs: Sequence[torch.Tensor], seed: int, training: bool) -> list[str]:
    """The results of `function` and, with `training`, gradients that the contract cannot judge.

    Named as `verify` names them, which runs with the same seed on the same values.
    """
    with torch.random.fork_rng(), torch.set_grad_enabled(training):
        eager = run_eager(function, inputs, seed=seed, training=training)
        joint = joint_graph(function, inputs, eager, seed=seed, training=training)
        with torch.no_grad():
            tipped = _tipped(joint.graph, joint.inputs, seed)
    (nodes,) = joint.graph.graph.output_node().args
    assert isinstance(nodes, (list, tuple))
    results = zip(joint.names, nodes, strict=True)
    return [name for name, node in results if isinstance(node, fx.Node) and behind(node) & tipped]


def _tipped(graph: fx.GraphModule, inputs: Sequence[torch.Tensor], seed: int) -> set[fx.Node]:
    """The decisions that another correct implementation might have taken otherwise."""
    eager = Decisions(graph)
    run(eager, copies(inputs), seed)
    tipped = _beyond_wide_products(graph.graph) & eager.decided.keys() | _of_nan_by_place(graph, inputs, seed)
    others = [Rounded(graph, eager.decided, draw, coarse=False) for draw in range(FINE)]
    for other in [*others, _Exact(graph, eager.decided, FINE, coarse=False)]:
        run(other, copies(inputs), seed)
        tipped |= other.tipped
    return tipped


def _beyond_wide_products(graph: fx.Graph) -> set[fx.Node]:
    """What depends on a product of 16-bit values that other operators rounded."""
    rounded, beyond = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        if any(x in beyond or (x in rounded and operator_name(node.target) in PRODUCTS) for x in node.all_input_nodes):
            beyond.add(node)
        value = node.meta.get("val")
        narrow = isinstance(value, torch.Tensor) and value.is_floating_point() and value.itemsize == 2
        rounds = node.op == "call_function" and operator_name(node.target) not in EXACT | PRODUCTS
        if narrow and (rounds or any(x in rounded for x in node.all_input_nodes)):
            rounded.add(node)
    return beyond


def _of_nan_by_place(graph: fx.GraphModule, inputs: Sequence[torch.Tensor], seed: int) -> set[fx.Node]:
    values = _Values(graph)
    run(values, copies(inputs), seed)
    found = [node for node in graph.graph.nodes if operator_name(node.target) in NAN_BY_PLACE]
    return {node for node in found if any(x in values.with_nan for x in node.all_input_nodes)}


class _Values(fx.Interpreter):
    """Notes which values have a NaN."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.with_nan: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        is_number = isinstance(result, torch.Tensor) and result.is_floating_point() and not result.is_meta
        if is_number and result.isnan().any():
            self.with_nan.add(n)
        return result


class _Exact(Rounded):
    """Rounds the result of every operator once, and nothing inside of it."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().call_function(target, args, kwargs)
        if torch.Tag.nondeterministic_seeded in getattr(target, "tags", (torch.Tag.nondeterministic_seeded,)):
            return result
        if not operator_name(target) or target._schema.is_mutable:
            return result
        try:
            wide = target(*tree_map(_widened, args), **tree_map(_widened, kwargs))
        except (RuntimeError, TypeError):
            return result
        return tree_map(lambda w, r: w.to(r.dtype) if isinstance(r, torch.Tensor) else r, wide, result)

    def _off(self, value: torch.Tensor) -> torch.Tensor:
        return value


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value
