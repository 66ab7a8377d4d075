"""Writes recurrent layers out step by step before they are traced, so that equal steps can be left out.

    lstm(x, (h, c), …)   →   linear(x, w), unbind; for each step linear(h, u), add, chunk, sigmoid, …; cat

The steps are those of PyTorch's own decomposition, with which AOTAutograd would replace the call. A layer that a
library runs as one call stays one call.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tilewright.graph.canonical import MODES, canonical_name

aten = torch.ops.aten
LAYERS: dict[Any, tuple[torch._ops.OpOverload, int]] = {
    torch.lstm: (aten.lstm.input, 1),
    torch.gru: (aten.gru.input, 2),
    torch.rnn_tanh: (aten.rnn_tanh.input, 2),
    torch.rnn_relu: (aten.rnn_relu.input, 2),
}
"""What computes each layer, and the place of an argument that is a list unless the sequences are packed."""


class _NotWritten(Exception):
    """The layer reads or makes a tensor that no recorded call gave."""


def write_out_steps(module: fx.GraphModule) -> None:
    """Replace each recurrent layer of a program, as Dynamo captured it, by the calls of its steps."""
    graph = module.graph
    if any(canonical_name(node) in MODES for node in graph.nodes):
        # Outside of its mode a call may give another dtype.
        return
    for node in [node for node in graph.nodes if node.op == "call_function" and node.target in LAYERS]:
        layer, place = LAYERS[node.target]
        taken = all(user.target is operator.getitem for user in node.users)
        if taken and not node.kwargs and isinstance(node.args[place], (list, tuple)):
            _write_out(node, torch._decomp.decomposition_table[layer])
    module.recompile()


def _write_out(node: fx.Node, layer: Callable[..., Any]) -> None:
    last = node.prev
    recorder = _Recorder(node)
    try:
        with node.graph.inserting_before(node), recorder:
            results = layer(*fx.map_arg(node.args, recorder.value))
        replaced = {user: recorder.nodes[id(results[user.args[1]])] for user in node.users}
    except (_NotWritten, KeyError):
        while node.prev is not last:
            node.graph.erase_node(node.prev)
        return
    for user, result in replaced.items():
        user.replace_all_uses_with(result)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


class _Recorder(TorchFunctionMode):
    """Writes each call that gives tensors into the graph, before the layer that it is part of."""

    def __init__(self, layer: fx.Node) -> None:
        super().__init__()
        self.layer = layer
        self.nodes: dict[int, fx.Node] = {}

    def value(self, node: fx.Node) -> Any:
        """The example of an operand."""
        value = node.meta["example_value"]
        self.nodes[id(value)] = node
        return value

    def node(self, value: torch.Tensor) -> fx.Node:
        if id(value) not in self.nodes:
            raise _NotWritten
        return self.nodes[id(value)]

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            given = torch.utils._pytree.tree_map_only(torch.Tensor, self.node, (args, kwargs))
            is_method = isinstance(func, types.MethodDescriptorType)
            self._note(result, "call_method" if is_method else "call_function", func, *given)
        return result

    def _note(self, value: Any, op: str, func: Any, args: Any, kwargs: Any) -> None:
        target = func.__name__ if op == "call_method" else func
        node = self.layer.graph.create_node(op, target, args, kwargs)
        node.meta = {**self.layer.meta, "example_value": value}
        if isinstance(value, torch.Tensor):
            self.nodes[id(value)] = node
        else:
            for place, part in enumerate(value):
                self._note(part, "call_function", operator.getitem, (node, place), {})
