"""The account of a program: one case captured as eager runs it and as tilewright would, with every cost.

Nothing is computed: a capture ends as soon as its graphs are known.
"""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from tilewright.cost.memory import MemoryStep, live_bytes, storage
from tilewright.cost.nests import nest_cost
from tilewright.cost.operators import operator_cost
from tilewright.cost.symbols import pretty
from tilewright.emit.source import language_of, source_of
from tilewright.graph import calls
from tilewright.graph.capture import Boxed, through_aot
from tilewright.graph.dims import SymbolicShapes, symbolic_shapes
from tilewright.graph.refusal import refusal
from tilewright.graph.source import source_line
from tilewright.graph.tree import Group, annotated_tree
from tilewright.hardware.floor import floor_us
from tilewright.hardware.profiles import DeviceProfile
from tilewright.measure.inputs import make_inputs, on_device
from tilewright.operators.table import row_of
from tilewright.passes.attention.kernel import Raced
from tilewright.passes.attention.recognise import Price, unpriced
from tilewright.passes.fusion import Region, fuse
from tilewright.passes.pipeline import optimise_joint, optimise_module
from tilewright.passes.recompute import values_to_save
from tilewright.passes.schedule import Unit, schedule
from tilewright.records import program as records
from tilewright.records.case import Case
from tilewright.records.errors import CaptureError
from tilewright.records.program import Cost, Decision, GraphName, OperatorClass, Program
from tilewright.runtime.assemble import Scheduled, taken_over
from tilewright.tune.attention import race, raced
from tilewright.tune.settle import settle

INPUT_NAME = re.compile(r"l_inputs_(\d+)_?$")
HELD_NAME = re.compile(r"(primals|tangents)_\d+$|arg\d+_\d+$")
"""Placeholders that are the caller's: parameters, inputs and gradients of results."""


@dataclass
class Captured:
    """The graphs of one case, and which placeholder of the forward graph is which input."""

    graphs: dict[GraphName, fx.Graph] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    """Placeholder position → position in the case's inputs."""
    decisions: list[Decision] = field(default_factory=list)


def capture(
    case: Case, *, optimised: bool, device: str = "cpu", measure: bool = False, price: Price = unpriced
) -> Captured:
    """The forward graph (and, in training, the backward graph) of `case`.

    `optimised` applies every rewrite up to the cut into forward and backward, after a race of the attention
    kernels with `measure`, and gives decisions on attention a `price`; else the graphs are those that eager
    runs. Raises CaptureError where the program is not one graph, or one whose sizes depend on the data, and
    InputError where the model refuses its inputs.
    """
    captured = Captured()
    function = on_device(case.build(), device)
    inputs = make_inputs(case, seed=0, device=device, requires_grad=case.training)

    def program(*inputs: torch.Tensor) -> Any:
        return function(*inputs)

    def observe(module: fx.GraphModule, examples: Sequence[Any], **_: Any) -> Callable[..., Any]:
        return through_aot(_Observer(captured, optimised, race if measure else raced, price), module, list(examples))

    torch._dynamo.reset()
    try:
        with torch.set_grad_enabled(case.training), _without_log():
            torch.compile(program, backend=observe, fullgraph=True, dynamic=False)(*inputs)
    except _Seen:
        pass
    except torch._dynamo.exc.TorchDynamoException as error:
        raise refusal(case.name, error) from error
    finally:
        torch._dynamo.reset()
    if not captured.graphs:
        raise CaptureError(f"{case.name} computes no tensor from its inputs; there is nothing to explain")
    for graph in captured.graphs.values():
        _refuse_unknown_sizes(case.name, graph)
    return captured


class _Seen(BaseException):
    """Both graphs are known and the program need not run: a model's buffers must stay as they are.

    No Exception, since PyTorch would report that as the failure of a compiler.
    """


@contextmanager
def _without_log() -> Iterator[None]:
    """What goes wrong while tensors are faked becomes an error of ours; PyTorch logs it as its own, too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _refuse_unknown_sizes(name: str, graph: fx.Graph) -> None:
    for node in graph.nodes:
        try:
            for value in calls.outputs(node):
                if value is not None:
                    calls.shape_of(value)
        except CaptureError as error:
            raise CaptureError(f"{name} has no fixed shapes at {source_line(node) or node.name}\n  {error}") from error


@dataclass
class _Observer:
    """Keeps the graphs of one capture, and ends it."""

    captured: Captured
    optimised: bool
    raced: Raced
    price: Price

    def before_autograd(self, module: fx.GraphModule) -> None:
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        for position, node in enumerate(placeholders):
            if match := INPUT_NAME.search(node.name):
                self.captured.inputs[position] = int(match[1])
        if self.optimised:
            self.captured.decisions += optimise_module(module, self.price)

    def joint(self, graph: fx.Graph) -> None:
        if self.optimised:
            self.captured.decisions += optimise_joint(graph, self.raced)

    def saved(self, graph: fx.Graph, needed: Sequence[fx.Node], forward: set[fx.Node]) -> Sequence[fx.Node]:
        return values_to_save(graph, needed, forward) if self.optimised else list(needed)

    def compile_pair(self, forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[Boxed, Boxed]:
        self.captured.graphs = {"forward": forward.graph, "backward": backward.graph}
        raise _Seen

    def compile_inference(self, module: fx.GraphModule) -> Boxed:
        self.captured.graphs = {"forward": module.graph}
        raise _Seen


# From graphs to records.


@dataclass
class Account:
    """A case's program, and the graphs it was read from."""

    program: Program
    eager: Captured
    planned: Captured


def account(case: Case, profile: DeviceProfile, *, measure: bool = False, device: str = "cpu") -> Account:
    """Operators as eager runs them, the planned regions, the decisions and the memory of `case`.

    `measure` races each region against its operators one by one on this machine, and on a GPU each attention.
    """
    eager = capture(case, optimised=False, device=device)

    def price(cost: Cost, dtype: str) -> float | None:
        return _floor(cost, dtype, "compute", profile)[0]

    planned = capture(case, optimised=True, device=device, measure=measure, price=price)
    program = Program(decisions=list(planned.decisions))
    shapes = _shapes(case, eager)
    for name, graph in eager.graphs.items():
        program.operators += operators_before(name, graph, shapes[name], profile)
        program.memory += _memory(name, "before", eager, _eager_steps(graph))
    shapes = _shapes(case, planned)
    for name, graph in planned.graphs.items():
        proposed = fuse(graph, name)
        fusion = settle(proposed, measure=measure)
        units = schedule(graph, fusion.regions)
        program.decisions += with_predictions(
            fusion.decisions, [*proposed.regions, *proposed.refused], shapes[name], profile
        )
        launches, regions = operators_after(name, units, shapes[name], profile)
        program.operators += launches
        program.regions += regions
        program.decisions = list(_with_floors(program.decisions, launches))
        program.memory += _memory(name, "after", planned, _planned_steps(graph, units))
    return Account(program, eager, planned)


def _shapes(case: Case, captured: Captured) -> dict[GraphName, SymbolicShapes]:
    graph = captured.graphs["forward"]
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    named = {
        placeholders[position].name: tuple(case.inputs[index].names)
        for position, index in captured.inputs.items()
        if position < len(placeholders)
    }
    shapes = {"forward": symbolic_shapes(graph, named, case.named_sizes())}
    if "backward" in captured.graphs:
        shapes["backward"] = symbolic_shapes(
            captured.graphs["backward"], {}, case.named_sizes(), forward=shapes["forward"]
        )
    return shapes  # type: ignore[return-value]


def operator_class(node: fx.Node) -> OperatorClass:
    row = row_of(node.target)
    if row is not None:
        return row.operator_class
    return "random" if getattr(node.target, "__name__", "") == "keep_mask" else "unknown"


def operators_before(
    name: GraphName, graph: fx.Graph, shapes: SymbolicShapes, profile: DeviceProfile
) -> list[records.Operator]:
    """One record for each operator that eager launches or views it makes."""
    nodes = [n for n in graph.nodes if n.op == "call_function" and not _is_result_of_several(n)]
    return [_operator(name, "before", i, n, operator_cost(n, shapes), shapes, profile) for i, n in enumerate(nodes)]


def _is_result_of_several(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def _operator(
    graph: GraphName,
    stage: records.Stage,
    index: int,
    node: fx.Node,
    cost: Cost,
    shapes: SymbolicShapes,
    profile: DeviceProfile,
) -> records.Operator:
    value = next((v for v in calls.outputs(node) if v is not None), None)
    kind = operator_class(node)
    floor, bound = (None, None) if kind == "layout" else _floor(cost, _dtype(value), kind, profile)
    symbolic = shapes.of_outputs(node)[0] if value is not None else None
    return records.Operator(
        graph=graph,
        stage=stage,
        index=index,
        name=node.name,
        target=str(node.target) if row_of(node.target) else calls.operator_name(node.target),
        operator_class=kind,
        shape=calls.shape_of(value) if value is not None else (),
        dtype=_dtype(value),
        cost=cost,
        floor_us=floor,
        bound=bound,
        source=source_line(node),
        shape_symbolic=None if symbolic is None else "[" + ", ".join(map(pretty, symbolic)) + "]",
        inputs=tuple(dict.fromkeys(_behind_results(n).name for n in node.all_input_nodes)),
    )


def _behind_results(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0] if _is_result_of_several(node) else node


def _dtype(value: torch.Tensor | None) -> str:
    return "" if value is None else str(value.dtype).removeprefix("torch.")


def _floor(cost: Cost, dtype: str, kind: str, profile: DeviceProfile) -> tuple[float | None, str | None]:
    if cost.provenance == "unknown":
        return None, None
    return floor_us(
        cost.bytes,
        cost.flops,
        cost.transcendentals,
        dtype,
        cost.bytes,
        profile,
        kind,
        bytes_written=cost.bytes_written,
    )


def operators_after(
    name: GraphName, units: Sequence[Unit], shapes: SymbolicShapes, profile: DeviceProfile
) -> tuple[list[records.Operator], list[records.Region]]:
    """One record for each launch of the planned program, and one for each region among them."""
    launches: list[records.Operator] = []
    regions: list[records.Region] = []
    maker = {value: unit.name for unit in units if isinstance(unit, Region) for value in unit.lowered.outputs}
    for index, unit in enumerate(units):
        if isinstance(unit, fx.Node):
            if not _is_result_of_several(unit):
                record = _operator(name, "after", index, unit, operator_cost(unit, shapes), shapes, profile)
                reads = tuple(dict.fromkeys(maker.get(n, _behind_results(n).name) for n in unit.all_input_nodes))
                launches.append(replace(record, inputs=reads))
            continue
        region = _region(name, unit, shapes, profile)
        regions.append(region)
        last = unit.lowered.outputs[-1].meta["val"]
        launches.append(
            records.Operator(
                graph=name,
                stage="after",
                index=index,
                name=unit.name,
                target="kernel",
                operator_class=operator_class(max(unit.members, key=lambda n: operator_class(n) == "reduction")),
                shape=calls.shape_of(last),
                dtype=_dtype(last),
                cost=region.cost,
                floor_us=region.floor_us,
                bound=region.bound,
                region=unit.name,
                source=source_line(unit.members[-1]),
                inputs=tuple(dict.fromkeys(maker.get(n, _behind_results(n).name) for n in unit.lowered.inputs)),
            )
        )
    return launches, regions


def _region(name: GraphName, region: Region, shapes: SymbolicShapes, profile: DeviceProfile) -> records.Region:
    cost, floor, bound = _price(region, shapes, profile)
    return records.Region(
        graph=name,
        name=region.name,
        members=tuple(n.name for n in region.members),
        cost=cost,
        language=language_of(region.device),
        source_code=source_of(region),
        floor_us=floor,
        bound=bound,
        predicted_us=floor,
    )


def _price(region: Region, shapes: SymbolicShapes, profile: DeviceProfile) -> tuple[Cost, float | None, str | None]:
    cost = nest_cost(region.lowered, [operator_cost(n, shapes) for n in region.members], shapes)
    return cost, *_floor(cost, _dtype(region.lowered.outputs[-1].meta["val"]), "pointwise", profile)


def with_predictions(
    decisions: Iterable[Decision], proposed: Iterable[Region], shapes: SymbolicShapes, profile: DeviceProfile
) -> Iterator[Decision]:
    """The decisions with the predicted time of the kernel that each pair was proposed to be part of.

    Where a race refuted the proposal, its measured time stands beside this prediction.
    """
    priced = [({n.name for n in r.members}, _price(r, shapes, profile)[1]) for r in proposed if len(r.members) > 1]
    for decision in decisions:
        pair = {decision.producer, decision.consumer}
        yield replace(decision, predicted_us=next((floor for members, floor in priced if pair <= members), None))


def _with_floors(decisions: Iterable[Decision], launches: Iterable[records.Operator]) -> Iterator[Decision]:
    """The decisions on an attention kernel with the floor of the launch that they chose."""
    floors = {launch.name: launch.floor_us for launch in launches}
    for decision in decisions:
        chosen = decision.passed_by == "attention" and decision.predicted_us is None
        yield replace(decision, predicted_us=floors.get(decision.consumer)) if chosen else decision


def tree_of(case: Case) -> Group:
    """The forward graph of `case` as eager runs it, as an annotated tree."""
    # Captured for inference, where views that only backward needs do not stand behind the result.
    case = replace(case, training=False)
    captured = capture(case, optimised=False)
    return annotated_tree(captured.graphs["forward"], _shapes(case, captured)["forward"], case.name)


# Memory


def _eager_steps(graph: fx.Graph) -> list[MemoryStep]:
    return [MemoryStep(n.name, tuple(n.all_input_nodes), (n,)) for n in graph.nodes if n.op == "call_function"]


def _planned_steps(graph: fx.Graph, units: Sequence[Unit]) -> list[MemoryStep]:
    over = taken_over(Scheduled(graph, list(units)))
    return [
        MemoryStep(
            unit.name,
            unit.lowered.inputs,
            unit.lowered.outputs,
            replaces=tuple(over[node] for node in unit.lowered.outputs if node in over),
        )
        if isinstance(unit, Region)
        else MemoryStep(unit.name, tuple(unit.all_input_nodes), (unit,))
        for unit in units
    ]


def _memory(
    name: GraphName, stage: records.Stage, captured: Captured, steps: Sequence[MemoryStep]
) -> list[records.MemoryPoint]:
    """Live bytes beyond what the caller holds anyway: saved tensors count, parameters and inputs do not."""
    graph = captured.graphs[name]
    forward = {n.name: n for n in captured.graphs["forward"].nodes}
    saved = [n for n in graph.nodes if n.op == "placeholder" and not HELD_NAME.match(n.name)]
    # Backward is handed views, too; they share what forward made, or what the caller holds.
    made = {node: storage(forward.get(node.name, node)) for node in saved}
    standing = {storage: node for node, storage in reversed(made.items())}
    same = {node: standing[storage] for node, storage in made.items()}
    inputs = [node for node in saved if not HELD_NAME.match(made[node].name)]
    points = live_bytes(steps, inputs, graph.output_node().all_input_nodes, same)
    return [
        records.MemoryPoint(name, stage, index, step.name, live)
        for index, (step, live) in enumerate(zip(steps, points, strict=True))
    ]
