"""Interprets a nest step by step over whole arrays: slow, short, and independent of every emitter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.hardware.target import Language
from tilewright.loops.lower import Lowered, lower
from tilewright.loops.nest import Level, Nest, Step
from tilewright.operators.table import row_of

Array = NDArray[Any]

SCALAR: dict[str, Callable[..., Array]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "exp": np.exp,
    "log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "tanh": np.tanh, "abs": np.abs,
    "maximum": np.maximum, "minimum": np.minimum, "where": np.where, "isnan": np.isnan, "eq": np.equal,
    "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip
REDUCE: dict[str, Callable[..., Array]] = {
    "sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min, "any": np.any, "all": np.all,
}  # fmt: skip


@dataclass(frozen=True)
class Captured:
    """A function as a graph, and the nest of all its operators."""

    graph: fx.Graph
    lowered: Lowered

    @property
    def nest(self) -> Nest:
        return self.lowered.nest


def capture(
    function: Callable[..., Any], *inputs: Tensor, name: str = "kernel", language: Language = "c++"
) -> Captured:
    """One nest for all operators of `function`; raises Unfusable where there is none."""
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    members = []
    for node in graph.nodes:
        row = row_of(node.target) if node.op == "call_function" else None
        if node.op == "call_function" and (row is None or row.operator_class != "layout" or row.name == "getitem"):
            members.append(node)
    results = [node for node in graph.output_node().all_input_nodes if node.op != "placeholder"]
    return Captured(graph, lower(members, results, name, language))


def run(captured: Captured, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of the nest, computed step by step; checks what every nest promises on the way."""
    nest, graph = captured.nest, captured.graph
    given = dict(zip((n for n in graph.nodes if n.op == "placeholder"), inputs, strict=True))
    memory = [_storage(_view(node, given)) for node in captured.lowered.inputs]
    values: list[Array] = []
    for step in nest.steps:
        values.append(_value(nest, step, [values[a] for a in step.args], memory))
        _check(nest, step, values[-1])
    results = []
    for store, node in zip(nest.stores, captured.lowered.outputs, strict=True):
        meta = node.meta["val"]
        result = torch.zeros(meta.shape, dtype=meta.dtype).as_strided(meta.shape, meta.stride())
        places = _places(nest, store.access.strides)
        flat = _storage(result)
        written, counts = np.unique(places, return_counts=True)
        assert len(written) == meta.numel() and (counts == 1).all(), "each element is written once"
        value = np.broadcast_to(values[store.value], np.broadcast_shapes(places.shape, values[store.value].shape))
        assert value.shape == places.shape, "a store covers what its value varies with"
        flat[places] = value
        results.append(torch.from_numpy(flat.copy()).as_strided(meta.shape, meta.stride()))
    return results


def _view(node: fx.Node, given: dict[fx.Node, Tensor]) -> Tensor:
    """An input of the graph, or a view of one."""
    if node in given:
        return given[node]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _view(n, given))
    found: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return found


def _storage(tensor: Tensor) -> Array:
    """The elements of a tensor's storage from its first element on."""
    count = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    found: Array = tensor.detach().as_strided((count,), (1,)).numpy()
    return found


def _places(nest: Nest, strides: Sequence[int]) -> Array:
    """The index of an access at every point of the nest; size 1 along axes it does not vary with."""
    extents = nest.rows + nest.cols
    total = np.zeros([1] * len(extents), dtype=np.int64)
    for axis, (extent, stride) in enumerate(zip(extents, strides, strict=True)):
        if stride:
            shape = [1] * len(extents)
            shape[axis] = extent
            total = total + stride * np.arange(extent).reshape(shape)
    return total


def _value(nest: Nest, step: Step, args: list[Array], memory: list[Array]) -> Array:
    rank, rows = len(nest.rows) + len(nest.cols), len(nest.rows)
    if step.name == "load":
        assert step.access
        places, stored = step.access.offset + _places(nest, step.access.strides), memory[step.access.buffer]
        for index, stride in zip(args, step.access.by, strict=False):
            places = places + index * stride
        if nest.condition(step) is None:
            return stored[places]
        places, inside = np.broadcast_arrays(places, args[-1])
        assert ((places >= 0) & (places < len(stored)))[inside].all(), "a load stays inside its buffer"
        return np.where(inside, stored[np.clip(places, 0, len(stored) - 1)], stored.dtype.type(0))
    if step.name == "check":
        assert ((args[0] >= 0) & (args[0] < step.constant) | ~(args[1] if args[1:] else np.False_)).all()
        return args[0]
    if step.name == "const":
        return np.full([1] * rank, step.constant, dtype=step.dtype)
    if step.name == "index":
        assert step.strides is not None
        return _places(nest, step.strides)
    if step.name in ("reduce_cols", "reduce_rows"):
        axes = range(rows, rank) if step.name == "reduce_cols" else range(rows)
        return REDUCE[step.kind or ""](args[0], axis=tuple(axes), keepdims=True)
    if step.name == "cast":
        return args[0].astype(step.to)
    return SCALAR[step.name](*args)


def _check(nest: Nest, step: Step, value: Array) -> None:
    """The level of a step says what it varies with, and what it reads is known by then."""
    rows, cols = value.shape[: len(nest.rows)], value.shape[len(nest.rows) :]
    varies = any(n > 1 for n in rows), any(n > 1 for n in cols)
    levels = {Level.SCALAR: (False, False), Level.ROW: (True, False), Level.COL: (False, True)}
    # An axis of one element varies in name only.
    allowed = levels.get(step.level, (True, True))
    assert all(may or not does for does, may in zip(varies, allowed, strict=True)), step
    for position in step.args:
        source = nest.steps[position]
        assert step.stage >= source.stage + (source.name == "reduce_cols")
        assert step.where == "after" or (source.where == "body" and source.name != "reduce_rows")
