"""Plans a captured program; explaining, measuring and compiling all use this planner.

torch-level graph, joint graph → rewrites (`stages.py`)
cut               → which forward values are saved, which are computed again
each graph        → rewrites → fusion → schedule → sources
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import fx

from tilewright.capture.aot import Rewriter
from tilewright.capture.input_names import rename
from tilewright.compile import stages
from tilewright.compile.launches import kernels_us
from tilewright.compile.plan import GraphPlan, Plan
from tilewright.emit.source import source_of
from tilewright.graph import calls
from tilewright.graph.snapshot import Snapshot
from tilewright.hardware.target import Target
from tilewright.loops.lower import lower
from tilewright.loops.nest import Nest, nameless
from tilewright.loops.reuse import Lowerings
from tilewright.loops.sizes import NotAlike
from tilewright.operators.axes import Unfusable
from tilewright.passes.attention.library import name_attention
from tilewright.passes.fusion import Fusion, Region, fuse
from tilewright.passes.recompute import values_to_save
from tilewright.passes.rematerialise import Copied, compute_in_each_reader, copy_again
from tilewright.passes.rule import Judged, judged
from tilewright.passes.schedule import schedule
from tilewright.passes.simplify import drop_unread
from tilewright.passes.stage import Pass, attempt, left_out, skipped
from tilewright.passes.units import live_out, with_results
from tilewright.records.errors import CaptureError
from tilewright.records.program import Decision, GraphName

MOST_TIMES = 1.02
"""Copies of chains move fewer bytes; they stay if the kernels are not predicted to take longer than this many times."""


class Eager(Rewriter):
    """Leaves a program as eager runs it on a target, and names each call after the operator that runs there."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def joint(self, graph: fx.Graph) -> object:
        """Name PyTorch's attention, which is traced as the one for CPUs, after PyTorch's choice for the target."""
        name_attention(graph, self.target)
        for node in graph.nodes:
            if calls.launched(node) is not node.target:
                rename(node, calls.operator_name(calls.launched(node)))
        return None


class Planner(Rewriter):
    """Plans one program for one target: called by AOTAutograd at each step of a capture, in this order.

    Without `hand_written` the plan has only generated kernels and library calls. `decisions` collects the decisions.
    """

    def __init__(self, target: Target, *, hand_written: bool = True, decisions: list[Decision] | None = None) -> None:
        self.target = target
        self.hand_written = hand_written
        self.decisions = [] if decisions is None else decisions

    @property
    def runs_on_cpu(self) -> bool:
        return not self.target.is_gpu

    def before_autograd(self, module: fx.GraphModule) -> list[Decision]:
        """Rewrite Dynamo's graph of torch functions."""
        decisions = stages.TORCH_LEVEL.run(module.graph, self.target)
        module.recompile()
        return self._noted(decisions)

    def joint(self, graph: fx.Graph) -> list[Decision]:
        """Rewrite a joint forward and backward graph, or one for inference, of ATen operators."""
        Eager(self.target).joint(graph)
        # What takes the place of a call is not launched as that one; EACH_GRAPH names those that stay.
        for node in graph.nodes:
            node.meta.pop(calls.LAUNCHED, None)
        return self._noted(stages.JOINT.run(graph, self.target, hand_written=self.hand_written))

    def saved(self, graph: fx.Graph, needed: Sequence[fx.Node], forward: set[fx.Node]) -> Sequence[fx.Node]:
        """The forward values to save for backward, which recomputes other `needed` values."""
        try:
            return values_to_save(graph, needed, forward)
        # Whatever it raises, all that backward needs can be saved.
        except Exception as error:
            self.decisions.append(left_out("values_to_save", error, Snapshot(graph)))
            return needed

    def plan(self, graphs: Mapping[GraphName, fx.Graph]) -> Plan:
        """The plan of a program's graphs. Raises CaptureError for a device that no kernel is generated for."""
        kernels, lowerings = _Kernels(), Lowerings()
        planned = [self._plan(name, graph, kernels, lowerings) for name, graph in graphs.items()]
        return Plan(self.target, planned, list(self.decisions))

    def plan_like(self, other: GraphPlan, graph: fx.Graph) -> GraphPlan:
        """The plan of a graph with other sizes, with the rewrites and regions of `other`. Raises NotAlike."""
        with judged(other.judged):
            stages.EACH_GRAPH.run(graph, self.target, name=other.name, hand_written=self.hand_written)
        fusion = Fusion(_fuse_like(graph, other))
        sources = {region.name: "" for region in fusion.regions}
        return GraphPlan(
            other.name, graph, fusion, schedule(graph, fusion.regions), sources, other.copied, other.judged
        )

    def _plan(self, name: GraphName, graph: fx.Graph, kernels: _Kernels, lowerings: Lowerings) -> GraphPlan:
        with judged(worth := Judged()):
            written = stages.EACH_GRAPH.run(graph, self.target, name=name, hand_written=self.hand_written)
        fusion, copied, failed = self._fused(name, graph, lowerings)
        fusion.decisions[:0] = written + [replace(decision, graph=name) for decision in failed]
        for region in fusion.regions:
            if region.device.type not in ("cpu", "cuda"):
                raise CaptureError(f"no kernel is generated for the device {region.device}")
        sources = {region.name: kernels.source(region) for region in fusion.regions}
        return GraphPlan(name, graph, fusion, schedule(graph, fusion.regions), sources, copied, worth)

    def _fused(
        self, name: GraphName, graph: fx.Graph, lowerings: Lowerings
    ) -> tuple[Fusion, list[Copied], list[Decision]]:
        """The regions, after copies of chains into those that read them if it pays, and decisions about what failed."""
        fused = partial(fuse, graph, name, self.target, lowerings=lowerings)
        fusion, copied, failed = fused(), list[Copied](), list[Decision]()

        def copy_into_readers(graph: fx.Graph, target: Target) -> None:
            nonlocal fusion
            before, units = Snapshot(graph), schedule(graph, fusion.regions)
            found = compute_in_each_reader(graph, fusion.regions, target.profile)
            if not found:
                return
            # Copies change what regions read, and no call: the units before are priced as they were.
            us = kernels_us(units, target.profile)
            drop_unread(graph)
            fusion = fused()
            if kernels_us(schedule(graph, fusion.regions), target.profile) <= MOST_TIMES * us:
                copied.extend(found)
            else:
                before.put_back()
                fusion = fused()

        if "compute_in_each_reader" not in skipped():
            failed += attempt(Pass("compute_in_each_reader", copy_into_readers), graph, self.target)
        # A pass that is taken back leaves other nodes.
        return fused() if failed else fusion, copied, failed

    def _noted(self, decisions: list[Decision]) -> list[Decision]:
        self.decisions += decisions
        return decisions


class _Kernels:
    """The kernels of one plan. Regions that compute the same, as those of equal layers do, share one."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[Nest, str]] = {}

    def source(self, region: Region) -> str:
        """The source of the region's kernel; the region takes over the nest of the first equal region."""
        nest = region.lowered.nest
        # Not the nests themselves: 0.0 equals -0.0, and True equals 1.
        key = repr(nameless(nest)) + region.language
        if key not in self.known:
            self.known[key] = nest, source_of(region.lowered)
        shared, source = self.known[key]
        region.share(shared)
        return source


def _fuse_like(graph: fx.Graph, other: GraphPlan) -> list[Region]:
    """The regions of `graph` with the members that those of `other` have, after the same copies of chains: a program
    for all sizes of a graph has one structure. Raises NotAlike for other nodes, or regions that are no kernels here."""

    def like(region: Region, members: list[fx.Node]) -> Region:
        lowered = lower(with_results(members, order), live_out(members), region.kernel, region.language)
        return Region(members, lowered, region.name)

    try:
        copy_again(graph, other.copied)
        named = {node.name: node for node in graph.nodes}
        members = [[named[node.name] for node in region.members] for region in other.fusion.regions]
    except KeyError as error:
        raise NotAlike(f"at some of them it has no {error.args[0]}") from error
    order = {node: place for place, node in enumerate(graph.nodes)}
    try:
        return [like(region, nodes) for region, nodes in zip(other.fusion.regions, members, strict=True)]
    except Unfusable as error:
        raise NotAlike(str(error)) from error
