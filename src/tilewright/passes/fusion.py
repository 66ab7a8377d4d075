"""Horizontal fusion: pointwise chains with the row and column reductions beside them.

    h = gelu(x); d = h · mask; y = d + r     →   one kernel that reads x, mask, r and writes y

Starting from one region an operator, every edge is tried once in graph order and regions are
merged where one loop nest can hold them, no cycle arises, and bytes are saved. Regions that read the same tensor
without depending on each other are merged too, except operators that backward recomputes with operators that need
gradients: the memory of the former can be free before the latter run. Every pair of neighbours leaves a `Decision`:
taken, refused (legal, but it does not pay), or impossible, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

import torch
from torch import fx

from tilewright.cost.kinds import arithmetic_us, instructions_us
from tilewright.graph.calls import nbytes, operator_name, readers, results, shape_of
from tilewright.graph.source import source_line
from tilewright.graph.undefined import is_tangent
from tilewright.hardware.floor import cache_us, dram_us
from tilewright.hardware.profiles import DeviceProfile
from tilewright.hardware.target import Language, Target
from tilewright.loops.lower import Lowered
from tilewright.loops.nest import Nest
from tilewright.loops.reuse import Lowerings
from tilewright.operators.axes import Unfusable
from tilewright.passes.strided import starves, strides
from tilewright.passes.units import (
    Reachability,
    behind_views,
    is_elementwise,
    is_fusible,
    is_view,
    kernel_name,
    live_out,
    sources,
    values_of,
    whose_kernel,
    with_results,
)
from tilewright.records.program import Decision, GraphName, Verdict
from tilewright.records.progress import tell

COPIED = "tilewright_copied"
"""In a call's `meta`: the call was copied for the kernel that reads it."""
MOST_BUFFERS = 24
"""The largest number of tensors that a nest streams from at once; more exceed the hardware prefetchers."""
MANY_STEPS = 64
"""A kernel with more steps may repeat those of a value for several slices of it."""
MANY = 8
"""A kernel with at least this many times the elements of a value may recompute the value too often."""


@dataclass(eq=False)
class Region:
    """Operators that become one kernel; `members` are in graph order, without the views between them."""

    members: list[fx.Node]
    lowered: Lowered
    name: str = ""

    def __post_init__(self) -> None:
        self.name = self.name or self.kernel

    @property
    def kernel(self) -> str:
        """The name of its function; regions that compute the same share one."""
        return self.lowered.nest.name

    @property
    def device(self) -> torch.device:
        """The device of its results; 0-d operands may be on the CPU all the same."""
        value: torch.Tensor = self.lowered.outputs[0].meta["val"]
        return value.device

    @property
    def language(self) -> Language:
        return self.lowered.language

    def rename(self, name: str) -> None:
        self.name = name
        self.share(replace(self.lowered.nest, name=name))

    def share(self, nest: Nest) -> None:
        """Run the kernel of another region's nest, which differs from this nest only in names."""
        self.lowered = replace(self.lowered, nest=nest)


@dataclass(eq=False)
class _Elementwise:
    """Elementwise operators of one shape, which become one region; lowered once, when all members are known.

    Lowering after every merge, or looking at every member, would take time quadratic in their number.
    """

    members: list[fx.Node]
    operands: set[fx.Node]
    """What they read from other kernels."""
    written: set[fx.Node]
    """Members that other kernels read."""


@dataclass
class Fusion:
    """The proposed kernels of one graph, with the decisions."""

    regions: list[Region]
    decisions: list[Decision] = field(default_factory=list)
    refused: list[Region] = field(default_factory=list)
    """Merges that were possible but not made; their price goes into the decisions."""


def fuse(graph: fx.Graph, graph_name: GraphName, target: Target, *, lowerings: Lowerings | None = None) -> Fusion:
    """Partition the operators of `graph` into regions for `target`; the others stay library calls.

    `lowerings`: those of the program so far.
    """
    lowerings = lowerings or Lowerings()
    try:
        return _Fuser(graph, graph_name, target, lowerings).run()
    except Unfusable:
        # A group of elementwise operators did not fit one nest after all.
        return _Fuser(graph, graph_name, target, lowerings, lower_each=True).run()


class _Fuser:
    def __init__(
        self, graph: fx.Graph, graph_name: GraphName, target: Target, lowerings: Lowerings, *, lower_each: bool = False
    ) -> None:
        self.graph = graph
        self.lowerings = lowerings
        self.target = target
        self.lower_each = lower_each
        self.graph_name = graph_name
        self.reach = Reachability(graph)
        self.gradients = sum(self.reach.bit[n] for n in graph.nodes if is_tangent(n))
        self.operators = [n for n in graph.nodes if n.op == "call_function" and not is_view(n)]
        self.impossible: dict[fx.Node, str] = {}
        self.region: dict[fx.Node, Region | _Elementwise] = {}
        self.too_wide: list[Region] = []
        self.reasons: dict[tuple[fx.Node, fx.Node], tuple[Verdict, str]] = {}

    def run(self) -> Fusion:
        for node in self.operators:
            reason = whose_kernel(node, self.target) or is_fusible(node)
            if reason is None and any(value.users for value in values_of(node)):
                try:
                    self.region[node] = Region([node], self._lower([node]))
                    continue
                except Unfusable as error:
                    reason = str(error)
            self.impossible[node] = reason or "nothing reads its result"
        self._join_copies()
        for number, node in enumerate(self.operators):
            if not number % 100:
                tell("operators tried for fusion", number, len(self.operators))
            if node in self.region and not self._widens_for_reader(node):
                self._try_producers(node)
        for node in self.operators:
            if node in self.region and self._widens_for_reader(node):
                self._try_producers(node)
        self._retry()
        self._siblings()
        self._leave_transposed_copies()
        regions = [self._lowered(region) for region in dict.fromkeys(self.region.values())]
        for number, region in enumerate(regions):
            region.rename(kernel_name(region.members, self.graph_name, number))
        return Fusion(regions, list(self._decisions()), self.too_wide)

    def _join_copies(self) -> None:
        """Merge copies with their readers, before anything else is merged; not in kernels that transpose, which take up
        to eight times as long as predicted where they read several values for each element."""
        for node in reversed([node for node in self.operators if node.meta.get(COPIED) and node in self.region]):
            for reader in readers(node):
                if reader in self.region:
                    self._try(node, reader, transposed=False)

    def _try_producers(self, node: fx.Node) -> None:
        # The largest producer first, since a merge can make the next one impossible.
        producers = [producer for producer in dict.fromkeys(sources(node)) if producer in self.region]
        for producer in sorted(producers, key=nbytes, reverse=True):
            self._try(producer, node)

    def _widens_for_reader(self, node: fx.Node) -> bool:
        """Whether this is a widening cast with one reader, whose kernel should compute it."""
        if operator_name(node.target) != "_to_copy" or len(found := list(readers(node))) != 1:
            return False
        narrow, wide = (x.meta["val"].element_size() for x in (node.all_input_nodes[0], node))
        return narrow < wide and found[0] in self.region and not is_elementwise(found[0])

    def _lower(self, members: list[fx.Node]) -> Lowered:
        name, outputs = kernel_name(members, self.graph_name, 0), live_out(members)
        language = self.target.language_of(outputs[0].meta["val"].device)
        return self.lowerings.lower(with_results(members, self.reach.order), outputs, name, language)

    def _lowered(self, region: Region | _Elementwise) -> Region:
        return region if isinstance(region, Region) else Region(region.members, self._lower(region.members))

    def _try(self, producer: fx.Node, consumer: fx.Node, *, transposed: bool = True) -> None:
        """Merge the regions of two neighbours, or note why not; one that transposes, if it may be `transposed`."""
        first, second = self.region[producer], self.region[consumer]
        if first is second:
            return
        members = sorted({*first.members, *second.members}, key=self.reach.order.__getitem__)
        outcome = self._attempt(members, first, second)
        if isinstance(outcome, Region) and outcome.lowered.nest.transposes and not transposed:
            return
        if isinstance(outcome, Region) and (reason := self._refusal(outcome.lowered, first, second)) is not None:
            outcome = "refused", reason
        if isinstance(outcome, tuple):
            self.reasons[producer, consumer] = outcome
            return
        self.reach.merge(members)
        for node in members:
            self.region[node] = outcome

    def _refusal(self, merged: Lowered, first: Region | _Elementwise, second: Region | _Elementwise) -> str | None:
        """Why the merged kernel would be slower than two; None if it is not known to be."""
        parts = [part.lowered for part in (first, second) if isinstance(part, Region)]
        if strides(merged) and not any(map(strides, parts)):
            return "one kernel would jump through memory from element to element; two read and write it in order"
        if starves(merged) and not any(map(starves, parts)):
            return "few programs would each reread a long row; two kernels divide each row among many programs"
        if self._computes_again(merged, first, second):
            return "the kernel would recompute it for many elements, which takes longer than reading it"
        return None

    def _attempt(
        self, members: list[fx.Node], first: Region | _Elementwise, second: Region | _Elementwise
    ) -> Region | _Elementwise | tuple[Verdict, str]:
        if self.reach.makes_cycle(members):
            return (
                "impossible",
                "another kernel must run between them: it reads the first and its result goes into the second",
            )
        parts = self._elementwise(first), self._elementwise(second)
        if parts[0] and parts[1] and (joined := _joined(members, parts[0], parts[1])):
            return joined
        try:
            lowered = self._lower(members)
        except Unfusable as error:
            return "impossible", str(error)
        if len(lowered.nest.buffers) > MOST_BUFFERS:
            self.too_wide.append(Region(members, lowered))
            many = len(lowered.nest.buffers)
            return "refused", f"one kernel would stream {many} tensors at once; two stream fewer each"
        return Region(members, lowered)

    def _computes_again(self, merged: Lowered, first: Region | _Elementwise, second: Region | _Elementwise) -> bool:
        """Whether the arithmetic that `merged` repeats takes longer than reading the results of `first`."""
        elements, profile = _elements(second), self.target.profile
        is_for_many = elements >= MANY * _elements(first)
        if not is_for_many and len(merged.nest.steps) <= MANY_STEPS:
            return False
        time_us = arithmetic_us if is_for_many else instructions_us
        parts = [self._lowered(region).lowered for region in (first, second)]
        again_us = time_us(merged.nest, profile) - sum(time_us(part.nest, profile) for part in parts)
        return again_us > _reading_us(parts[0], elements, profile)

    def _elementwise(self, region: Region | _Elementwise) -> _Elementwise | None:
        if isinstance(region, _Elementwise):
            return region
        node = region.members[0]
        is_one = not self.lower_each and len(region.members) == 1 and is_elementwise(node)
        return _Elementwise([node], set(node.all_input_nodes), {node}) if is_one else None

    def _retry(self) -> None:
        """Merge pairs whose producer had other readers, if these have since been merged with the consumer."""
        for (producer, consumer), (verdict, _) in reversed(self.reasons.items()):
            mine, target = self.region[producer], self.region[consumer]
            others = {self.region.get(r) for value in values_of(producer) for r in readers(value)} - {mine}
            if verdict == "impossible" and mine is not target and others == {target}:
                self._try(producer, consumer)

    def _siblings(self) -> None:
        """Merge regions that read the same large tensor and do not depend on each other."""
        for node in self.graph.nodes:
            if node.op not in ("placeholder", "call_function") or is_view(node):
                continue
            rows = list(dict.fromkeys(r for r in readers(node) if r in self.region))
            for first, second in pairwise(rows):
                same_size = nbytes(first) == nbytes(second) or nbytes(node) >= max(nbytes(first), nbytes(second))
                apart = self.region[first] is not self.region[second]
                if apart and same_size and self._waits_for_gradients(first) == self._waits_for_gradients(second):
                    self._try(first, second)

    def _leave_transposed_copies(self) -> None:
        """On a CPU, leave transposed copies to PyTorch: 1024 × 1024 in its blocks takes 1.6 ms, in a nest's tiles 2."""
        for node, region in list(self.region.items()):
            if operator_name(node.target) != "clone" or len(region.members) > 1:
                continue
            made = self._lowered(region)
            if made.language == "c++" and made.lowered.nest.transposes:
                del self.region[node]
                self.impossible[node] = "PyTorch copies it in blocks, which read and write whole cache lines"

    def _waits_for_gradients(self, node: fx.Node) -> bool:
        return any(self.reach.above[member] & self.gradients for member in self.region[node].members)

    def _decisions(self) -> Iterable[Decision]:
        for consumer in self.operators:
            for producer in dict.fromkeys(sources(consumer)):
                if producer.op == "call_function":
                    yield self._decision(producer, consumer)

    def _decision(self, producer: fx.Node, consumer: fx.Node) -> Decision:
        saved = 0
        verdict: Verdict
        if producer in self.region and self.region[producer] is self.region.get(consumer):
            saved, stays = self._saved(producer, consumer)
            verdict, reason = "taken", f"stays in registers{', and is also stored for other kernels' if stays else ''}"
        elif (blocked := self.impossible.get(producer) or self.impossible.get(consumer)) is not None:
            verdict, reason = "impossible", blocked
        else:
            verdict, reason = self.reasons.get(
                (producer, consumer), ("impossible", "after an earlier fusion, another kernel must run between them")
            )
        return Decision(
            self.graph_name, producer.name, consumer.name, verdict, reason, saved, source=source_line(consumer)
        )

    def _saved(self, producer: fx.Node, consumer: fx.Node) -> tuple[int, bool]:
        """Bytes that a merged pair no longer moves, and whether the producer's value is written all the same.

        Each consumer saves its read; a write that disappears is credited to the first consumer.
        """
        region = self.region[producer]
        read = sum(nbytes(operand) for operand in consumer.all_input_nodes if behind_views(operand) is producer)
        readers_of = {value: list(readers(value)) for value in values_of(producer)}
        kept = [value for value, found in readers_of.items() if any(self.region.get(x) is not region for x in found)]
        inside = {x for found in readers_of.values() for x in found if self.region.get(x) is region}
        is_first = consumer is min(inside, key=self.reach.order.__getitem__)
        unwritten = nbytes(producer) - sum(map(nbytes, kept)) if is_first else 0
        return min(read, nbytes(producer)) + unwritten, bool(kept)


def computes_again(made: Region, reader: Region, profile: DeviceProfile) -> bool:
    """Whether `reader` has so many more elements than `made` that it should read the results of `made`."""
    elements = _elements(reader)
    times = elements / _elements(made)
    return times >= MANY and times * arithmetic_us(made.lowered.nest, profile) > _reading_us(
        made.lowered, elements, profile
    )


def _reading_us(made: Lowered, elements: int, profile: DeviceProfile) -> float:
    """Predicted time to read `elements` elements of each result from a cache, and to launch the kernel of `made`."""
    nbytes = elements * sum(value.meta["val"].element_size() for value in made.outputs)
    return (cache_us(nbytes, 0, profile) or dram_us(nbytes, 0, profile)) + profile.launch_us


def _elements(region: Region | _Elementwise) -> int:
    """Elements of the largest result of its members."""
    return max(prod(shape_of(tensor)) for member in region.members for tensor in results(member))


def _joined(members: list[fx.Node], first: _Elementwise, second: _Elementwise) -> _Elementwise | None:
    """The members of both as one, if they have one shape and device, and few operands and results."""
    values = [part.members[0].meta["val"] for part in (first, second)]
    if len({(shape_of(value), value.device) for value in values}) > 1:
        return None
    inside = set(members)
    operands = (first.operands | second.operands) - inside
    written = {node for node in first.written | second.written if not inside.issuperset(readers(node))}
    return _Elementwise(members, operands, written) if len(operands) + len(written) <= MOST_BUFFERS else None
