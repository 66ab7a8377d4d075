"""The graph of one call's sizes, from one whose sizes are symbolic."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.capture import first_line
from tilewright.records.errors import CaptureError


@dataclass(frozen=True)
class SymbolicValue:
    """Stands in metadata for a value of symbolic size where its symbols are not known: in a program that was kept."""


def is_symbolic(module: fx.GraphModule) -> bool:
    """Whether a size in this graph is symbolic."""
    return any(has_symbols(node.meta.get("val")) for node in module.graph.nodes)


def sizes_are_given(module: fx.GraphModule) -> bool:
    """Whether the arguments of a call give a size of this graph that another call gives otherwise.

    A size that depends on data alone (of a `nonzero`) is a value of the graph; backward has it from forward.
    """
    return any(calls.is_known(size) for node in module.graph.nodes for size in _symbols(node.meta.get("val")))


def _symbols(value: object) -> Iterator[torch.SymInt]:
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) and has_symbols(value) else (value,)
    yield from (size for size in sizes if isinstance(size, torch.SymInt))


def has_symbols(value: object) -> bool:
    """Whether a value is a symbolic integer, or a tensor of symbolic size."""
    if isinstance(value, torch.Tensor):
        return bool(value._has_symbolic_sizes_strides)
    return isinstance(value, (torch.SymInt, SymbolicValue))


def binding(args: Sequence[Any], *, offsets: bool) -> Hashable:
    """The key of the values that a call gives a graph's symbols: its integers, and its tensors' shapes and strides.

    With `offsets` also their storage offsets, for a graph that reads them (`reads_offsets`).
    """
    return tuple(
        (a.shape, a.stride(), a.storage_offset() if offsets else 0)
        if isinstance(a, torch.Tensor)
        else a if isinstance(a, int) else None
        for a in args
    )  # fmt: skip


def reads_offsets(module: fx.GraphModule) -> bool:
    return any(node.target is torch.ops.aten.sym_storage_offset.default for node in module.graph.nodes)


def specialise(module: fx.GraphModule, args: Sequence[Any]) -> fx.GraphModule:
    """The graph of a symbolic `module` for the sizes that `args` have.

        n = sym_size(x, 0); m = n * 4; y = view(x, [m])      →   y = view(x, [32])

    Numbers computed from sizes become constants, and metadata are those of `args`. Other numbers
    (a learning rate) stay values of the graph; so do sizes that depend on data (of a `nonzero`), which are symbols in
    the metadata. Runs on fake tensors. Raises CaptureError where such a size would have to be known.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Sizes are static; the shape environment is for those that depend on data, and for offsets of nested tensors.
    symbols = ShapeEnv()
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols) as mode, torch.no_grad():
        return _Specialiser(module, mode).run(list(args))


class _Specialiser:
    def __init__(self, module: fx.GraphModule, mode: Any) -> None:
        self.module = module
        self.mode = mode
        self.graph = fx.Graph()
        self.known: dict[fx.Node, Any] = {}
        """A node's counterpart in the new graph, or its constant value."""

    def run(self, args: list[Any]) -> fx.GraphModule:
        for node in self.module.graph.nodes:
            if node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], self.known.__getitem__))
            elif node.op == "placeholder":
                value = args.pop(0)
                counterpart = self._copy(node, self._without_data(value))
                self.known[node] = value if isinstance(value, int) else counterpart
            else:
                self._call(node)
        return fx.GraphModule(self.module, self.graph)

    def _call(self, node: fx.Node) -> None:
        value = self._value(node)
        fixed = all(
            not isinstance(self.known[n], fx.Node) or isinstance(self._meta(n), torch.Tensor)
            for n in node.all_input_nodes
        )
        if fixed and isinstance(value, (int, float)):
            self.known[node] = value
        elif isinstance(value, int):
            raise CaptureError(f"{node.name} is an integer that depends on data")
        else:
            self.known[node] = self._copy(node, value)

    def _value(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._without_data(attrgetter(str(node.target))(self.module))
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._meta)
        target: Any = node.target
        try:
            return target(*args, **kwargs)
        except Exception as error:
            raise CaptureError(f"the shape of {node.target} is unknown before it runs: {first_line(error)}") from error

    def _without_data(self, value: Any) -> Any:
        return self.mode.from_tensor(value.detach(), static_shapes=True) if isinstance(value, torch.Tensor) else value

    def _copy(self, node: fx.Node, value: Any) -> fx.Node:
        copied = self.graph.node_copy(node, self.known.__getitem__)
        copied.meta = {**node.meta, "val": value}
        return copied

    def _meta(self, node: fx.Node) -> Any:
        known = self.known[node]
        return known.meta["val"] if isinstance(known, fx.Node) else known
