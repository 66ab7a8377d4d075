"""Graphs as bytes and back: `pack` writes values that refer to nodes of some graphs, and the graphs with them.

A node keeps its place, name, target, arguments, and the metadata that planning and running read: what its value is
(tensors as shape, strides, dtype, device and offset), flags of passes, and where it came from. `unpack` gives new
graphs with fake tensors as metadata. Constants of a graph are kept by value. The current CUDA device is the current one
of the process that unpacks.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from tilewright.graph.specialise import SymbolicValue, has_symbols
from tilewright.pytorch.state import in_real_tensors
from tilewright.records.errors import CaptureError

MOST_CONSTANT_BYTES = 2**24
"""A graph whose constants take more is not packed."""
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_ORIGIN = ("stack_trace", *_STACKS)

Constants = dict[str, tuple[torch.Tensor, torch.device]]
"""By name: elements on the CPU, and the device that they belong on."""


class Unpackable(CaptureError):
    """A graph holds something that bytes cannot stand for."""


def pack(value: object, graphs: Sequence[fx.Graph], *, symbolic: bool = False) -> bytes:
    """`value`, plain data which may refer to these graphs and their nodes. Raises Unpackable with the reason.

    With `symbolic`, values of symbolic size are packed as `SymbolicValue`.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, graphs)
    try:
        with in_real_tensors():
            pickler.dump([(len(graph.nodes), _constants(graph)) for graph in graphs])
            for graph in graphs:
                for node in graph.nodes:
                    meta = _metadata(node, pickler.texts, symbolic)
                    pickler.dump((node.op, node.name, node.target, node.args, node.kwargs, meta))
            pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise Unpackable(f"{type(error).__name__}: {error}") from error
    return buffer.getvalue()


def pack_or_none(graph: fx.Graph, *, symbolic: bool = False) -> bytes | None:
    """A graph alone; None where bytes cannot stand for it."""
    try:
        return pack(graph, [graph], symbolic=symbolic)
    except Unpackable:
        return None


def unpack(content: bytes) -> Any:
    """The value that `pack` was given, over new graphs."""
    with in_real_tensors():
        return _unpacked(_Unpickler(io.BytesIO(content)))


def _unpacked(unpickler: _Unpickler) -> Any:
    for count, constants in unpickler.load():
        graph = fx.Graph()
        nodes: list[fx.Node] = []
        unpickler.graphs.append((graph, nodes))
        for _ in range(count):
            op, name, target, args, kwargs, meta = unpickler.load()
            node = graph.create_node(op, target, args, kwargs, name)
            node.meta = meta
            nodes.append(node)
        _own(graph, constants)
    return unpickler.load()


def _own(graph: fx.Graph, constants: Constants) -> None:
    """Give a graph the module that holds its constants; its Python code is generated at the first call."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    _LazyGraphModule({name: value.to(device) for name, (value, device) in constants.items()}, graph)


def _constants(graph: fx.Graph) -> Constants:
    """Each of PyTorch's own class, since others may mean more than their elements."""
    found: Constants = {}
    for node in graph.find_nodes(op="get_attr"):
        value = attrgetter(str(node.target))(graph.owning_module)
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.requires_grad:
            raise Unpackable(f"{node.name} is a {type(value).__name__} that the graph holds")
        found[str(node.target)] = value.cpu(), value.device
    if sum(value.untyped_storage().nbytes() for value, _ in found.values()) > MOST_CONSTANT_BYTES:
        raise Unpackable("its constants are too large")
    return found


def _metadata(node: fx.Node, texts: dict[str, str], symbolic: bool) -> dict[str, Any]:
    meta = {key: value for key, value in node.meta.items() if key not in _ORIGIN and _is_plain(value)}
    if "val" in node.meta:
        value = node.meta["val"]
        meta["val"] = SymbolicValue() if symbolic and any(map(_is_symbolic, tree_leaves(value))) else value
    if isinstance(trace := node.meta.get("stack_trace"), str):
        # One text for all nodes of a line: a text is written once.
        meta["stack_trace"] = texts.setdefault(trace, trace)
    for key in _STACKS:
        if stack := node.meta.get(key):
            # A class may be one of `__main__`, which the next process does not have; readers ask for its name.
            meta[key] = {
                name: (str(path), getattr(kind, "__name__", str(kind))) for name, (path, kind) in stack.items()
            }
    return meta


def _is_symbolic(value: object) -> bool:
    # A size may be used as a float, such as a scale of an interpolation, or in a comparison.
    return has_symbols(value) or isinstance(value, (torch.SymFloat, torch.SymBool))


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(x) for key, x in value.items())
    return type(value) in (bool, int, float, str, type(None))


_NUMBERS = (bool, int, float, complex, str, bytes, type(None))


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, graphs: Sequence[fx.Graph]) -> None:
        super().__init__(buffer, protocol=5)
        self.graphs = {graph: number for number, graph in enumerate(graphs)}
        self.places = {node: (number, i) for graph, number in self.graphs.items() for i, node in enumerate(graph.nodes)}
        self.texts: dict[str, str] = {}

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind in _NUMBERS or kind in (tuple, list, dict):
            return None
        if isinstance(value, fx.Node):
            return "node", *self._place(value)
        if isinstance(value, fx.Graph):
            return "graph", self.graphs[value]
        if kind is torch.device and value.type == "cuda" and value.index == torch.cuda.current_device():
            return ("here",)
        if isinstance(value, OpOverload):
            return "operator", value.namespace, value._opname, value._overloadname
        if isinstance(value, torch.Tensor) and kind is not torch.Tensor:
            return "tensor", *_described(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, torch.Generator, fx.GraphModule)):
            raise Unpackable(f"a graph refers to a {kind.__name__}")
        return None

    def _place(self, node: fx.Node) -> tuple[int, int]:
        if node not in self.places:
            raise Unpackable(f"{node.name} is no node of the graphs")
        return self.places[node]


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.graphs: list[tuple[fx.Graph, list[fx.Node]]] = []
        self.fake = _fakes()

    def persistent_load(self, pid: Any) -> Any:
        kind = pid[0]
        if kind == "node":
            return self.graphs[pid[1]][1][pid[2]]
        if kind == "tensor":
            return self.fake(*pid[1:])
        if kind == "operator":
            return getattr(getattr(getattr(torch.ops, pid[1]), pid[2]), pid[3])
        if kind == "here":
            return torch.device("cuda", torch.cuda.current_device())
        return self.graphs[pid[1]][0]


def _described(value: torch.Tensor) -> tuple[Any, ...]:
    """The description from which `_fakes` makes a fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    if type(value) is not FakeTensor or value.layout is not torch.strided or value._has_symbolic_sizes_strides:
        raise Unpackable(f"a value is a {type(value).__name__} of layout {value.layout}")
    if value.is_conj() or value.is_neg() or value.is_quantized:
        raise Unpackable("a value is shown conjugated, negated or quantised")
    return tuple(value.shape), tuple(value.stride()), value.dtype, value.device, int(value.storage_offset())


def _fakes() -> Callable[..., torch.Tensor]:
    """Makes fake tensors of one mode."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(
        shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, offset: int
    ) -> torch.Tensor:
        meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        if offset:
            extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if meta.numel() else 0
            meta = torch.empty(offset + extent, dtype=dtype, device="meta").as_strided(shape, strides, offset)
        return FakeTensor(mode, meta, device)

    return fake
