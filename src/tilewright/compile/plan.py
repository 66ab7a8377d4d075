"""A `Plan`: the graphs, kernels and order in which a program runs on a target, decided before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import fx

from tilewright.compile.memory import memory, planned_steps
from tilewright.graph.calls import launched
from tilewright.hardware.target import Target
from tilewright.passes.fusion import Fusion, Region
from tilewright.passes.rematerialise import Copied
from tilewright.passes.rule import Judged
from tilewright.passes.schedule import Unit, schedule
from tilewright.passes.units import is_view
from tilewright.records.program import Decision, GraphName, MemoryPoint


@dataclass
class GraphPlan:
    """One graph of a program, and how it runs."""

    name: GraphName
    graph: fx.Graph
    fusion: Fusion
    """The regions that become kernels, those that were proposed and refused, and a decision for each pair."""
    units: list[Unit]
    """Kernels, library calls and the views between them, in the order in which they run."""
    sources: dict[str, str]
    """By name of the region: the kernel's source in the language of its device."""
    copied: list[Copied] = field(default_factory=list)
    """Chains that were copied into the regions that read them."""
    judged: Judged = field(default_factory=dict)
    """Where the rewrites of this graph pay."""

    def bare(self) -> GraphPlan:
        """The plan without what only a recording reads."""
        return replace(self, fusion=replace(self.fusion, decisions=[], refused=[]))

    def without(self, kernel: str, why: str) -> GraphPlan:
        """The plan with the operators of one region as calls, since its kernel does not compile; a decision says so."""
        lost = next(region for region in self.fusion.regions if region.name == kernel)
        names = {node.name for node in lost.members}

        def follow(decision: Decision) -> Decision:
            is_inside = decision.verdict == "taken" and {decision.producer, decision.consumer} <= names
            return replace(decision, verdict="impossible", reason=why, bytes_saved=0) if is_inside else decision

        regions = [region for region in self.fusion.regions if region is not lost]
        fusion = replace(self.fusion, regions=regions, decisions=[follow(x) for x in self.fusion.decisions])
        return replace(self, fusion=fusion, units=schedule(self.graph, regions))

    def launches(self) -> Iterator[tuple[str, str]]:
        """The launches in order: the unit's name, and the generated kernel (`kernel`) or the operator called."""
        for unit in self.units:
            if isinstance(unit, Region):
                yield unit.name, "kernel"
            elif unit.op == "call_function" and not is_view(unit):
                yield unit.name, str(launched(unit))


@dataclass
class Plan:
    """A program's graphs as they run on `target`, and the decisions of the passes before fusion."""

    target: Target
    graphs: list[GraphPlan] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def launches(self) -> list[tuple[GraphName, str, str]]:
        """The launches in order: graph, unit, and kernel or operator."""
        return [(graph.name, *launch) for graph in self.graphs for launch in graph.launches()]

    def memory(self) -> list[MemoryPoint]:
        """Live bytes at each launch, without tensors that the caller owns."""
        graphs = {graph.name: graph.graph for graph in self.graphs}
        return [
            point
            for graph in self.graphs
            for point in memory(graph.name, "after", graphs, planned_steps(graph.graph, graph.units))
        ]

    @property
    def peak_bytes(self) -> int:
        """The largest number of live bytes in any of the graphs."""
        return max((point.live_bytes for point in self.memory()), default=0)
