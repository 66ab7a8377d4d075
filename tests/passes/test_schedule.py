"""A schedule runs everything once, after what it reads, and draws and writes in the order of the graph."""

import sys
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from tests.passes.graphs import aten, is_view
from tilewright.compile.memory import planned_steps
from tilewright.cost.memory import live_bytes
from tilewright.hardware.target import target_named
from tilewright.passes.fusion import Region, fuse
from tilewright.passes.schedule import Unit, schedule
from tilewright.passes.simplify import is_pure, simplify

SIZE = 3
OPERATIONS = ("exp", "mul", "add", "matmul", "transpose", "rows", "draw", "sums")


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[tuple[str, int, int]], list[int], list[tuple[int, int]]]:
    """Operations on earlier values, the values that are results, and writes of values to inputs at the end."""
    steps: list[tuple[str, int, int]] = []
    for number in range(draw(st.integers(1, 12))):
        values = st.integers(0, 1 + number)
        steps.append((draw(st.sampled_from(OPERATIONS)), draw(values), draw(values)))
    results = draw(st.lists(st.integers(2, 1 + len(steps)), min_size=1, max_size=3, unique=True))
    writes = draw(st.lists(st.tuples(st.integers(0, 1), st.integers(2, 1 + len(steps))), max_size=2))
    return steps, results, writes


def apply(operation: str, x: Tensor, y: Tensor) -> Tensor:
    match operation:
        case "exp":
            return torch.exp(-x.abs())
        case "mul":
            return x * y
        case "add":
            return x + y
        case "matmul":
            return (x @ y) / SIZE
        case "transpose":
            return x.t()
        case "rows":
            return x[:1].expand(SIZE, SIZE)
        case "draw":
            return torch.rand_like(x)
    return x.sum(1, keepdim=True).expand(SIZE, SIZE)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SIZE, SIZE, generator=generator), torch.randn(SIZE, SIZE, generator=generator)


def run(units: list[Unit], graph: fx.Graph, values: dict[fx.Node, Any]) -> list[Tensor]:
    """The units in their order; each finds what it reads, and a region leaves its outputs only."""

    def call(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
        target: Any = node.target
        return target(*args, **kwargs)

    for unit in units:
        if isinstance(unit, fx.Node):
            values[unit] = call(unit, values)
            continue
        inside = {node: values[node] for node in unit.lowered.inputs}
        wanted = {*unit.members, *unit.lowered.outputs}
        for node in graph.nodes:
            reachable = is_view(node) and set(node.all_input_nodes) <= set(inside)
            if node in wanted or (reachable and node not in inside):
                inside[node] = call(node, inside)
        # In memory, a view has become a tensor of its own.
        values.update({node: inside[node].clone() for node in unit.lowered.outputs})
    results = graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    return [values[node] for node in results]  # type: ignore[index]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(programs(), st.booleans())
def test_any_program_runs_in_its_schedule(program: Any, backward: bool) -> None:
    steps, results, writes = program

    def function(a: Tensor, b: Tensor) -> list[Tensor]:
        values = [a, b]
        for operation, x, y in steps:
            values.append(apply(operation, values[x], values[y]))
        # Results of their own: what is written at the end must not show in them.
        returned = [values[i].clone() for i in results]
        # A functionalised graph ends in its writes: nothing is read after the first of them.
        written = [values[source].clone() for _, source in writes]
        for (target, _), value in zip(writes, written, strict=True):
            values[target].copy_(value)
        return returned

    graph = aten(function, *inputs())
    simplify(graph, target_named("cpu"))
    if backward:
        second_is_a_gradient(graph)
    regions = fuse(graph, "forward", target_named("cpu")).regions
    units = schedule(graph, regions)
    assert_whole(units, graph, regions)

    ours, theirs = inputs(), inputs()
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    torch.manual_seed(4)
    found = run(units, graph, dict(zip(placeholders, ours, strict=True)))
    torch.manual_seed(4)
    torch.testing.assert_close(found, function(*theirs))
    torch.testing.assert_close(ours, theirs)


def second_is_a_gradient(graph: fx.Graph) -> None:
    """As AOTAutograd names the incoming gradients of a backward graph."""
    [n for n in graph.nodes if n.op == "placeholder"][1].target = "tangents_1"


def assert_whole(units: list[Unit], graph: fx.Graph, regions: list[Region]) -> None:
    assert set(Counter(units).values()) <= {1}
    assert set(regions) <= set(units)
    # Draws and writes: all of them, in the graph's order.
    calls = [n for n in graph.nodes if n.op == "call_function" and not is_view(n)]
    assert [u for u in units if isinstance(u, fx.Node) and u in calls and not is_pure(u)] == [
        n for n in calls if not is_pure(n)
    ]
    held = {node for region in regions for node in region.members}
    assert not held & {u for u in units if isinstance(u, fx.Node)}


def positions(units: list[Unit]) -> dict[str, int]:
    return {unit.name: position for position, unit in enumerate(units)}


def test_no_two_kernels_wait_for_each_other() -> None:
    """Each pair reads one input, and one of each what a product makes of the other pair."""

    def program(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.exp(), y.cos()
        return second @ w + x, first @ w + y

    graph = aten(program, *(torch.zeros(3, 3) for _ in range(3)))
    units = schedule(graph, fuse(graph, "forward", target_named("cpu")).regions)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    given = [torch.randn(3, 3) for _ in range(3)]
    found = run(units, graph, dict(zip(placeholders, given, strict=True)))
    torch.testing.assert_close(found, list(program(*given)))


def test_the_gradient_of_a_weight_comes_first_and_takes_what_it_reads_along() -> None:
    """gelu(x) is computed again for the weight's gradient, and is gone before that of the input is there."""

    def program(x: Tensor, gradient: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        of_input = gradient @ w.t()
        of_weight = F.gelu(x).t() @ gradient
        return torch.ops.aten.gelu_backward(of_input, x), of_weight

    graph = aten(program, torch.zeros(6, 5), torch.zeros(6, 3), torch.zeros(5, 3))
    second_is_a_gradient(graph)
    regions = fuse(graph, "backward", target_named("cpu")).regions
    assert [[node.name for node in region.members] for region in regions] == [["gelu"], ["gelu_backward"]]
    at = positions(schedule(graph, regions))
    assert at[regions[0].name] < at["mm_1"] < at["mm"] < at[regions[1].name]


def test_what_is_computed_again_is_not_there_before_it_is_read() -> None:
    """Of two layers both values stand at the beginning of the graph; the first layer's is read last."""

    def program(x: Tensor, gradient: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first, second = F.gelu(x), F.gelu(y)
        of_second = (second.t() @ gradient).sin()
        return (first.t() @ (gradient @ w)).sin(), of_second

    graph = aten(program, torch.zeros(9, 5), torch.zeros(9, 7), torch.zeros(9, 6), torch.zeros(7, 8))
    second_is_a_gradient(graph)
    at = positions(schedule(graph, []))
    assert at["gelu_1"] < at["mm"] < at["gelu"] < at["mm_2"]


def test_a_kernel_runs_at_the_place_of_its_last_member() -> None:
    """Before that its results would take memory that the calls between its members could have."""

    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = x.exp()
        product = x @ w
        return first + 1, product

    graph = aten(program, torch.zeros(6, 5), torch.zeros(5, 3))
    (region,) = regions = fuse(graph, "forward", target_named("cpu")).regions
    assert [node.name for node in region.members] == ["exp", "add"]
    at = positions(schedule(graph, regions))
    assert at["mm"] < at[region.name]


def test_what_a_call_waits_for_runs_in_the_order_of_the_graph() -> None:
    def program(x: Tensor, gradient: Tensor, y: Tensor) -> Tensor:
        first, second = F.gelu(x), F.gelu(y)
        return torch.addmm(gradient, second, first)

    graph = aten(program, torch.zeros(7, 5), torch.zeros(9, 5), torch.zeros(9, 7))
    second_is_a_gradient(graph)
    assert list(positions(schedule(graph, []))) == ["gelu", "gelu_1", "addmm"]


def test_draws_keep_their_order_where_one_of_them_waits_for_no_gradient() -> None:
    def program(x: Tensor, gradient: Tensor) -> Tensor:
        first, second = torch.rand_like(x), torch.rand_like(gradient)
        return gradient * second * first

    graph = aten(program, torch.zeros(7, 7), torch.zeros(7, 7))
    second_is_a_gradient(graph)
    assert list(positions(schedule(graph, []))) == ["rand_like", "rand_like_1", "mul", "mul_1"]


def test_a_long_chain_that_is_computed_again_is_followed_from_its_beginning() -> None:
    graph = aten(lambda x, gradient: x.sin() * gradient, torch.zeros(3), torch.zeros(3))
    second_is_a_gradient(graph)
    sin = next(node for node in graph.nodes if node.name == "sin")
    for _ in range(sys.getrecursionlimit()):
        with graph.inserting_after(sin):
            sin.replace_all_uses_with(copy := graph.node_copy(sin, lambda _, sin=sin: sin), lambda u: u.name == "mul")  # type: ignore[misc]
            copy.args, sin = (sin,), copy
    assert [unit.name for unit in schedule(graph, [])][-1] == "mul"


def test_gradients_of_weights_larger_than_what_they_read_come_last_and_the_peak_is_all_of_them() -> None:
    def program(x: Tensor, gradient: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inner = gradient @ w.t()
        return x.t() @ (inner @ v.t()), inner.t() @ x, gradient.t() @ inner

    size = 32
    graph = aten(program, *(torch.zeros(rows, size) for rows in (2, 2, size, size)))
    second_is_a_gradient(graph)
    units = schedule(graph, [])
    calls = [unit for unit in units if isinstance(unit, fx.Node) and not is_view(unit)]
    sizes = [call.meta["val"].numel() for call in calls]
    assert sizes == sorted(sizes), "products of two rows first, then the gradients of weights"
    row, weight = 4 * 2 * size, 4 * size * size
    live = live_bytes(planned_steps(graph, units), [], graph.output_node().all_input_nodes)
    assert max(live) <= 3 * weight + 2 * row


def test_of_gradients_that_come_last_the_one_that_frees_most_is_first() -> None:
    def program(x: Tensor, gradient: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.t() @ gradient[:2], y.t() @ gradient

    graph = aten(program, torch.zeros(2, 32), torch.zeros(8, 32), torch.zeros(8, 32))
    second_is_a_gradient(graph)
    at = positions(schedule(graph, []))
    assert at["mm_1"] < at["mm"]


def test_a_view_inside_a_kernel_does_not_run() -> None:
    graph = aten(lambda x, w: (x.exp().t().sin(), w.t() @ w), torch.zeros(3, 4), torch.zeros(5, 2))
    units = schedule(graph, fuse(graph, "forward", target_named("cpu")).regions)
    views = [unit for unit in units if isinstance(unit, fx.Node) and is_view(unit)]
    assert [view.all_input_nodes[0].name for view in views] == ["w_1"]


def test_what_no_kernel_reads_does_not_run() -> None:
    """The gradient of an average needs the shape of its operand, not its values: no product is computed for it."""

    def program(gradient: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.aten.avg_pool2d_backward(gradient, x @ w, [2, 2], [2, 2], [0, 0], False, True, None)

    graph = aten(program, torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 8, 8), torch.zeros(8, 8))
    units = schedule(graph, fuse(graph, "backward", target_named("cpu")).regions)
    assert [unit.name for unit in units] == ["backward0_avg_pool2d_backward"]
