"""Lowers sets of operators that differ only in the names of their tensors once, as those of equal layers do."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tilewright.hardware.target import Language
from tilewright.loops.exact import EXACT
from tilewright.loops.lower import Lowered, lower
from tilewright.loops.nest import Nest
from tilewright.loops.trace import Rounding, is_view_of_member
from tilewright.operators.axes import Unfusable


@dataclass(frozen=True)
class _Known:
    """A nest and the places of the nodes of its buffers among those that were described."""

    nest: Nest
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class _Refused:
    why: str
    names: tuple[str, ...]
    """Of the nodes that were described, which the reason may name."""


class Lowerings:
    """What `lower` gave for each set of operators of the graphs of one program."""

    def __init__(self) -> None:
        self.known: dict[Hashable, _Known | _Refused] = {}

    def lower(self, members: Sequence[fx.Node], outputs: Sequence[fx.Node], name: str, language: Language) -> Lowered:
        """As `loops.lower.lower`."""
        rounding = Rounding.of(members, outputs, language)
        described = _Described(members, rounding)
        key = language, tuple(described.rows), tuple(map(described.place_of, outputs))
        nodes = list(described.places)
        match self.known.get(key):
            case _Known() as known:
                return _with_nodes(known, nodes, name, language)
            case _Refused() as refused:
                raise Unfusable(_renamed(refused, nodes))
        try:
            lowered = lower(members, outputs, name, language, rounding)
        except Unfusable as error:
            self.known[key] = _Refused(str(error), tuple(node.name for node in nodes))
            raise
        inputs, stored = (tuple(map(described.places.__getitem__, x)) for x in (lowered.inputs, lowered.outputs))
        self.known[key] = _Known(lowered.nest, inputs, stored, lowered.numbers)
        return lowered


class _Described:
    """All that lowering reads of a set of operators, as rows that name no node."""

    def __init__(self, members: Sequence[fx.Node], rounding: Rounding) -> None:
        self.members = set(members)
        self.marks = rounding.exact, rounding.as_stored, rounding.rounded
        self.places: dict[fx.Node, int] = {}
        self.rows: list[Hashable] = []
        for node in members:
            self.place_of(node)

    def place_of(self, node: fx.Node) -> int:
        if node not in self.places:
            self._add(node)
        return self.places[node]

    def _add(self, node: fx.Node) -> None:
        """Describe a member or a view of one by what it computes, and another operand by its layout."""
        value = node.meta.get("val")
        values = value if isinstance(value, (tuple, list)) else (value,)
        row: tuple[Hashable, ...] = (node.meta.get(EXACT, False), *(node in marked for marked in self.marks))
        row += tuple(map(_layout, values))
        if self._is_computed(node):
            row += (node.target, self._argument(node.args), self._argument(tuple(node.kwargs.items())))
        self.places[node] = len(self.rows)
        self.rows.append(row)

    def _is_computed(self, node: fx.Node) -> bool:
        try:
            return is_view_of_member(node, self.members)
        except Unfusable:
            # Lowering raises it in its turn.
            return True

    def _argument(self, value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            return "node", self.place_of(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(self._argument, value))
        # 0.0 equals -0.0, and True equals 1.
        return type(value), repr(value)


def _layout(value: Any) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    bits = value.is_conj(), value.is_neg()
    return repr(value.shape), repr(value.stride()), value.dtype, value.device, value.layout, *bits


def _with_nodes(known: _Known, nodes: Sequence[fx.Node], name: str, language: Language) -> Lowered:
    inputs, outputs = (tuple(nodes[place] for place in places) for places in (known.inputs, known.outputs))
    named = [
        tuple(replace(buffer, name=node.name) for buffer, node in zip(buffers, found, strict=True))
        for buffers, found in ((known.nest.inputs, inputs), (known.nest.outputs, outputs))
    ]
    nest = replace(known.nest, name=name, inputs=named[0], outputs=named[1])
    return Lowered(nest, language, inputs, outputs, known.numbers)


def _renamed(refused: _Refused, nodes: Sequence[fx.Node]) -> str:
    names = dict(zip(refused.names, (node.name for node in nodes), strict=True))
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), refused.why)
