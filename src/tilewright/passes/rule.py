"""Rewrites as rules: a pattern of calls, a condition on what it binds, and what takes the place of the calls.

    @rule(call(aten.add.Tensor, call(aten.mm.default, "x", "w", alone=True), "bias"), on=gpu, where=is_bias)
    def add_biases_in_products(node: Node, bias: Node, x: Node, w: Node) -> Node:
        return insert_call(node, aten.addmm.default, bias, x, w)

The condition and the function name as parameters what they need: what the pattern binds, the `target`, and `node`, the
call that the whole pattern fits. Calls of the pattern without a reader afterwards are erased.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import fx
from torch.fx import Node

from tilewright.graph.calls import arguments
from tilewright.graph.canonical import argument, canonical_name, example, memory_of, mutates, written_by
from tilewright.graph.insert import replace as replace_node
from tilewright.graph.insert import replace_results
from tilewright.graph.source import source_line
from tilewright.graph.undefined import gradients
from tilewright.hardware.target import Target
from tilewright.passes.simplify import is_pure
from tilewright.passes.units import behind_views
from tilewright.records.errors import Refusal
from tilewright.records.program import Decision

COMMUTATIVE = frozenset({"add", "mul"})
Match = dict[str, Any]
"""What a pattern binds, by name; `calls` are the calls that it fits, operands first."""
NOTHING: Match = {"calls": ()}
Write = Callable[..., "Node | Sequence[Node | None] | None"]


@dataclass(frozen=True)
class Value:
    """Binds an argument of one of these types. A name binds the same value everywhere."""

    name: str
    types: tuple[type, ...] = (object,)


@dataclass(frozen=True)
class Call:
    """Fits a call of one of `operators` with these arguments."""

    operators: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str
    alone: bool
    through: frozenset[str]

    def calls(self, node: Node) -> bool:
        """Whether `node` calls one of the operators."""
        given = self.operators
        return node.op.startswith("call_") and (node.target in given or canonical_name(node) in given)


def call(
    operator: Any, *args: Any, name: str = "", alone: bool = False, through: Iterable[str] = (), **kwargs: Any
) -> Call:
    """A call of `operator`, or of one of a tuple: a canonical name fits every spelling, a function itself.

    Of its arguments, a string binds a tensor and `Value` anything; a function tests one; a tuple has alternatives; a
    list has a pattern for each element; any other pattern must be equal. An argument without a pattern must be absent
    or its default, unless the last pattern is `...`. In torch-level calls, keyword patterns also fit arguments by
    position, in this order behind the others. `name` binds the call; with `alone` it has no other reader. Between it
    and its reader there may be calls of `through`, bound as `NAME_seen`, the last first.
    """
    operators = operator if isinstance(operator, tuple) else (operator,)
    return Call(operators, args, kwargs, name, alone, frozenset(through))


def matches(pattern: Any, given: Any, found: Match = NOTHING) -> Iterator[Match]:
    """`found` with what `pattern` binds at an argument, for each way in which it fits."""
    if isinstance(pattern, Call):
        yield from _call_matches(pattern, given, found)
    elif isinstance(pattern, tuple):
        for one in pattern:
            yield from matches(one, given, found)
    elif isinstance(pattern, list):
        if isinstance(given, (list, tuple)) and len(given) == len(pattern):
            yield from _all_match(zip(pattern, given, strict=True), found)
    elif isinstance(pattern, str):
        if example(given) is not None:
            yield from matches(Value(pattern), given, found)
    elif isinstance(pattern, Value):
        known = found.get(pattern.name, given)
        if isinstance(given, pattern.types) and type(known) is type(given) and known == given:
            yield {**found, pattern.name: given}
    elif pattern(given) if callable(pattern) else type(given) is type(pattern) and given == pattern:
        yield found


def roots(pattern: Any, graph: fx.Graph) -> list[Node]:
    """The calls of operators of a pattern, or of its alternatives, in order."""
    wholes = pattern if isinstance(pattern, tuple) else (pattern,)
    operators = {operator for whole in wholes for operator in whole.operators}
    if any(isinstance(operator, str) for operator in operators):
        return [node for node in graph.nodes if any(whole.calls(node) for whole in wholes)]
    return sorted(n for operator in operators for n in graph.find_nodes(op="call_function", target=operator))


def _all_match(pairs: Iterable[tuple[Any, Any]], found: Match) -> list[Match]:
    ways = [found]
    for pattern, given in pairs:
        ways = [more for way in ways for more in matches(pattern, given, way)]
    return ways


def _call_matches(pattern: Call, node: Any, found: Match) -> Iterator[Match]:
    seen = list[Node]()
    while isinstance(node, Node) and not pattern.calls(node) and canonical_name(node) in pattern.through:
        seen.append(node)
        node = node.args[0]
    if not isinstance(node, Node) or not pattern.calls(node):
        return
    if pattern.alone and any(len(one.users) != 1 for one in (*seen, node)):
        return
    bound = {pattern.name: node, f"{pattern.name}_seen": seen} if pattern.name else {}
    orders = [pattern.args]
    if canonical_name(node) in COMMUTATIVE and ... not in pattern.args[:2]:
        orders.append((*pattern.args[1::-1], *pattern.args[2:]))
    for args in orders:
        for way in _all_match(_pairs(args, pattern.kwargs, node), {**found, **bound}):
            yield {**way, "calls": (*way["calls"], *reversed(seen), node)}


def _pairs(args: tuple[Any, ...], kwargs: dict[str, Any], node: Node) -> Iterator[tuple[Any, Any]]:
    """Each pattern with the argument that it is for; at last a pair that does not fit if `node` has other arguments."""
    is_open, args = args[-1:] == (...,), tuple(one for one in args if one is not ...)
    if named := arguments(node):
        wanted = {**dict(zip(named, args, strict=False)), **kwargs}
        yield from ((one, named.get(name)) for name, one in wanted.items())
        known = {one.name: one.default_value for one in node.target._schema.arguments if one.name not in wanted}  # type: ignore[union-attr]
        fits = len(args) <= len(named) and all(named[name] == default for name, default in known.items())
    else:
        wanted = {**{str(place): one for place, one in enumerate(args)}, **kwargs}
        yield from ((one, argument(node, place, name)) for place, (name, one) in enumerate(wanted.items()))
        fits = len(node.args) <= len(wanted) and node.kwargs.keys() <= kwargs.keys()
    if not fits and not is_open:
        yield None, node


def gpu(target: Target) -> bool:
    return target.is_gpu


def cpu(target: Target) -> bool:
    return not target.is_gpu


def cplusplus(target: Target) -> bool:
    return target.language == "c++"


def triton(target: Target) -> bool:
    return target.language == "triton"


Judged = dict[tuple[str, ...], bool]
"""By rule, call and its operands: whether it pays there."""
_known: ContextVar[Judged] = ContextVar("tilewright_judged")


@contextmanager
def judged(known: Judged) -> Iterator[None]:
    """In this block rules follow what is known of their worth, and add what is not."""
    token = _known.set(known)
    try:
        yield
    finally:
        _known.reset(token)


@dataclass
class Rule:
    """Rewrites what `pattern` fits, on targets for which `on` holds, where the condition `where` holds.

    `write` inserts calls before `node` and gives what takes its place, or one for each of its results; or it changes
    `node` and gives that; or it gives None if nothing is changed. If `where` gives a dict, that is bound too. With a
    `reason` each rewrite leaves a decision, which is `by` a pass of that name, and so does a Refusal that either
    raises: its message behind `refused`. The decision's producer is the first operand, or what that name binds.
    """

    name: str
    pattern: Any
    write: Write
    on: Callable[[Target], bool] = lambda target: True
    where: Callable[..., Any] = lambda: True
    worth: Callable[..., bool] = lambda: True
    """Whether it pays, at the sizes of this graph: other sizes of a program for all sizes follow the first."""
    reason: str | Callable[..., str] = ""
    refused: str = ""
    by: str = ""
    saved: Callable[..., int] = lambda: 0
    """Bytes."""
    hand_written: bool = False
    required: bool = False

    def run(self, graph: fx.Graph, target: Target) -> list[Decision]:
        """Rewrite `graph` in place; the decisions."""
        nodes = roots(self.pattern, graph) if self.on(target) else []
        behind = gradients(graph) if nodes and self.reason else set()
        # From the results upwards, so that the largest tree is found; what reads a result of the rule, once more.
        todo, again, decisions = [*nodes], set(nodes), list[Decision]()
        renamed: dict[str, str] = {}
        while todo:
            node = todo.pop()
            if node._erased or (found := self._at(node, target)) is None:
                continue
            decision, new = found
            decisions.append(replace(decision, graph="backward" if node in behind else "forward"))
            if new is not None and new is not node:
                renamed[node.name] = new.name
                todo += [user for user in new.users if user in again]
        # A producer may have been rewritten since.
        decisions = [replace(one, producer=renamed.get(one.producer, one.producer)) for one in reversed(decisions)]
        return decisions if self.reason else []

    __call__ = run

    def _at(self, node: Node, target: Target) -> tuple[Decision, Node | None] | None:
        """The decision about `node` and what takes its place; None if there is nothing to decide."""
        before = node.prev
        for found in matches(self.pattern, node, {**NOTHING, "node": node, "target": target}):
            here = undecided(found["calls"][0], self.by or self.name)
            here = replace(here, consumer=node.name, source=source_line(node))
            try:
                if not _may_move(found["calls"]) or not (more := _filled(self.where, found)):
                    continue
                found |= more if isinstance(more, dict) else {}
                if not self._pays(found):
                    continue
                producer, saved = found.get("producer"), _filled(self.saved, found)
                here = replace(here, producer=producer.name) if producer is not None else here
                if (new := self._rewritten(node, found)) is None:
                    return None
                reason = self.reason if isinstance(self.reason, str) else _filled(self.reason, found)
                return replace(here, consumer=new.name, verdict="taken", reason=reason, bytes_saved=saved), new
            except Refusal as refusal:
                while node.prev is not before:
                    node.graph.erase_node(node.prev)
                return replace(here, reason=f"{self.refused}{refusal}"), None
        return None

    def _pays(self, found: Match) -> bool:
        node, known = found["node"], _known.get({})
        # A reader of what was rewritten is asked again.
        asked = self.name, node.name, *(operand.name for operand in node.all_input_nodes)
        if asked not in known:
            known[asked] = bool(_filled(self.worth, found))
        return known[asked]

    def _rewritten(self, node: Node, found: Match) -> Node | None:
        """What takes the place of `node`; of several results, what computes the first."""
        operands = node.all_input_nodes
        new: Node | Sequence[Node | None] | None = _filled(self.write, found)
        operands += [operand for operand in node.all_input_nodes if operand not in operands]
        if new is None:
            return None
        if not isinstance(new, Node):
            replace_results(node, new)
            new = behind_views(next(one for one in new if one is not None))
        elif new is not node:
            replace_node(node, new)
        _erase_unread([*operands, *found["calls"]], found["calls"][:-1])
        return new


def _erase_unread(todo: list[Node], known: Sequence[Node]) -> None:
    """Erase those of these calls without a reader that are pure or `known`, and so on upwards."""
    while todo:
        node = todo.pop()
        if not node._erased and not node.users and (node in known or is_pure(node)):
            todo += node.all_input_nodes
            node.graph.erase_node(node)


def _filled(function: Callable[..., Any], found: Match) -> Any:
    return function(**{name: found[name] for name in _parameters(function) if name in found})


@cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _may_move(calls: Sequence[Node]) -> bool:
    """Whether the last of these calls can compute what the others do: between them nothing writes to what they read."""
    read = memories(calls[:-1])
    return not any(mutates(node) and memory_of(written_by(node)) in read for node in between(calls, calls[-1]))


def between(calls: Iterable[Node], last: Node) -> Iterator[Node]:
    """The nodes from `last` back to the first of these calls, which come before it, without `last`."""
    left, node = set(calls) - {last}, last
    while left:
        node = node.prev
        if node.op == "root":
            raise Refusal(f"{last.name} is computed before what it replaces")
        left.discard(node)
        yield node


def memories(calls: Iterable[Node]) -> set[int | None]:
    """The storages that calls read or give, None among them: what is written at an unknown place may be one."""
    return {None, *(memory_of(x) for call in calls for x in (call, *call.all_input_nodes))}


def undecided(node: Node, by: str, producer: Node | None = None) -> Decision:
    """The decision of a pass that `node` stays, to be completed: without a reason, about its first operand."""
    first = next(iter(node.all_input_nodes), node) if producer is None else producer
    source = source_line(node)
    return Decision("forward", behind_views(first).name, node.name, "refused", "", source=source, passed_by=by)


def rule(pattern: Any, **options: Any) -> Callable[[Write], Rule]:
    """The function below, as the `write` of a rule of its name."""
    return lambda write: Rule(write.__name__, pattern, write, **options)
