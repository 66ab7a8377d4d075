"""Specialises a graph of symbolic sizes to the sizes of one call."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.pytorch.sizes import fakes_in, size_from_data
from tilewright.records.errors import CaptureError, first_line
from tilewright.records.recipe import Layout


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
    values = [node.meta.get("val") for node in module.graph.nodes]
    # A program with sizes that depend on data is not kept.
    return any(isinstance(value, SymbolicValue) or any(map(calls.is_known, _symbols(value))) for value in values)


def _symbols(value: object) -> Iterator[torch.SymInt]:
    if has_symbols(value):
        yield from (size for size in _sizes(value) if isinstance(size, torch.SymInt))


def has_symbols(value: object) -> bool:
    """Whether a value is a symbolic integer, or a tensor of symbolic size."""
    if isinstance(value, torch.Tensor):
        return bool(value._has_symbolic_sizes_strides)
    return isinstance(value, (torch.SymInt, SymbolicValue))


def size_key(
    args: Sequence[Any], *, offsets: bool, counted: Mapping[int, torch.Tensor | None] | None = None
) -> Hashable:
    """The key of the values that a call gives a graph's symbols: its integers, and its tensors' shapes and strides.

    With `offsets` also their storage offsets, for a graph that reads them (`reads_offsets`). Sizes that depend on data
    are no part of it: `counted` are the arguments that have such (`counted_inputs`).
    """
    if counted:
        args = [_without_counts(a, counted[place]) if place in counted else a for place, a in enumerate(args)]
    return tuple(
        (a.shape, a.stride(), a.storage_offset() if offsets else 0)
        if isinstance(a, torch.Tensor)
        else a if isinstance(a, (int, tuple)) else None
        for a in args
    )  # fmt: skip


def counted_inputs(graph: fx.Graph) -> dict[int, torch.Tensor | None]:
    """Inputs whose sizes depend on data, by place: the traced tensor, or None where the input is itself such a size."""
    values = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    found = {place: value for place, value in enumerate(values) if not all(map(calls.is_known, _symbols(value)))}
    return {place: value if isinstance(value, torch.Tensor) else None for place, value in found.items()}


def _without_counts(argument: Any, traced: torch.Tensor | None) -> tuple[int, ...]:
    if traced is None:
        return ()
    sizes = zip((*argument.shape, *argument.stride()), (*traced.shape, *traced.stride()), strict=True)
    return tuple(size if calls.is_known(known) else -1 for size, known in sizes)


def reads_offsets(graph: fx.Graph) -> bool:
    return any(node.target is torch.ops.aten.sym_storage_offset.default for node in graph.nodes)


def specialise(module: fx.GraphModule, args: Sequence[Any]) -> fx.GraphModule:
    """The graph of a symbolic `module` for the sizes that `args` have.

        n = sym_size(x, 0); m = n * 4; y = view(x, [m])      →   y = view(x, [32])

    Numbers computed from sizes become constants, and metadata are those of `args`, where a `Layout` stands for a tensor
    that is not made. Other numbers (a learning rate) stay values of the graph; so do sizes that depend on data (of a
    `nonzero`), which are symbols in the metadata. Runs on fake tensors. Raises CaptureError where such a size would
    have to be known.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Sizes are static; the shape environment is for those that depend on data, and for offsets of nested tensors.
    symbols = ShapeEnv()
    with fakes_in(symbols) as mode, torch.no_grad():
        return _Specialiser(module, mode, _Sizes(module, args, symbols)).run(list(args))


class _Sizes:
    """Sizes of one call's inputs: numbers, and new symbols for those that depend on data."""

    def __init__(self, module: fx.GraphModule, args: Sequence[Any], symbols: Any) -> None:
        self.symbols = symbols
        self.values: dict[Any, Any] = {}
        """By symbol of the traced graph: its number, or the new symbol that stands for it."""
        for node, value in zip(module.graph.find_nodes(op="placeholder"), args, strict=True):
            for traced, size in zip(_sizes(node.meta.get("val")), _sizes(value), strict=False):
                if isinstance(traced, torch.SymInt) and calls.is_known(traced) and traced.node.expr.is_Symbol:
                    self.values[traced.node.expr] = size

    def of(self, traced: int | torch.SymInt, size: int) -> int | torch.SymInt:
        """The size of this call, or the new symbol of one that depends on data. Raises CaptureError."""
        if calls.is_known(traced):
            return size
        expression = traced.node.expr  # type: ignore[union-attr]
        for symbol in expression.free_symbols - self.values.keys():
            self.values[symbol] = size_from_data(self.symbols).node.expr
        made: torch.SymInt = self.symbols.create_symintnode(expression.xreplace(self.values), hint=None)
        return made


def _sizes(value: object) -> Sequence[int | torch.SymInt]:
    if isinstance(value, torch.Tensor):
        return *value.shape, *value.stride()
    return [value] if isinstance(value, (int, torch.SymInt)) else []


class _Specialiser:
    def __init__(self, module: fx.GraphModule, mode: Any, sizes: _Sizes) -> None:
        self.module = module
        self.mode = mode
        self.sizes = sizes
        self.counted = counted_inputs(module.graph)
        self.graph = fx.Graph()
        self.known: dict[fx.Node, Any] = {}
        """A node's counterpart in the new graph, or its constant value."""

    def run(self, args: list[Any]) -> fx.GraphModule:
        for place, node in enumerate(self.module.graph.nodes):
            if node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], self.known.__getitem__))
            elif node.op == "placeholder":
                value = args.pop(0)
                if place in self.counted:
                    self.known[node] = self._copy(node, self._counted(node.meta["val"], value))
                    continue
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

    def _counted(self, traced: torch.Tensor | torch.SymInt, value: Any) -> Any:
        """An input whose sizes depend on data, or a size that does, with symbols in their place."""
        if not isinstance(traced, torch.Tensor):
            return self.sizes.of(traced, value)
        shape, strides = (
            map(self.sizes.of, traced.shape, value.shape),
            map(self.sizes.of, traced.stride(), value.stride()),
        )
        return torch.empty_strided(list(shape), list(strides), dtype=value.dtype, device=value.device)

    def _without_data(self, value: Any) -> Any:
        if isinstance(value, Layout):
            return torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device=value.device)
        return self.mode.from_tensor(value.detach(), static_shapes=True) if isinstance(value, torch.Tensor) else value

    def _copy(self, node: fx.Node, value: Any) -> fx.Node:
        copied = self.graph.node_copy(node, self.known.__getitem__)
        copied.meta = {**node.meta, "val": value}
        return copied

    def _meta(self, node: fx.Node) -> Any:
        known = self.known[node]
        return known.meta["val"] if isinstance(known, fx.Node) else known
