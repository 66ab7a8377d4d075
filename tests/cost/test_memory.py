"""Live memory against what PyTorch really allocates, steps that no program shows alone, and distances of reuse."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from examples import mlp, transformer_block
from tests.passes.graphs import aten
from tilewright.compile.price import price_case
from tilewright.cost.memory import MemoryStep, live_bytes, reuse_distances
from tilewright.cost.work import Distances, Work, predicted_us
from tilewright.graph import calls
from tilewright.graph.calls import nbytes
from tilewright.hardware.profiles import profile_for
from tilewright.hardware.target import target_named
from tilewright.measure.inputs import make_inputs
from tilewright.measure.memory import peak_bytes
from tilewright.records.case import Case, InputSpec
from tilewright.records.program import GraphName, Stage
from tilewright.verbs import Subject

KB = 1024
"""A tensor of 16×16 fp32."""


def square() -> Tensor:
    return torch.zeros(16, 16)


def test_inputs_that_backward_alone_holds_die_at_their_last_use() -> None:
    graph = aten(lambda saved, tangent: (saved.exp() * tangent).sin(), square(), square())
    nodes = {n.name: n for n in graph.nodes}
    steps = [MemoryStep(n.name, tuple(n.all_input_nodes), (n,)) for n in graph.nodes if n.op == "call_function"]
    points = live_bytes(steps, [nodes["saved_1"]], graph.output_node().all_input_nodes)
    assert points == [2 * KB, 2 * KB, 2 * KB]


def test_a_step_that_overwrites_its_operand_needs_nothing_more() -> None:
    graph = aten(lambda x: x.exp().sin(), square())
    exp, sin = (n for n in graph.nodes if n.op == "call_function")
    steps = [MemoryStep("exp", tuple(exp.all_input_nodes), (exp,)), MemoryStep("sin", (exp,), (sin,), replaces=(exp,))]
    assert live_bytes(steps, [], [sin]) == [KB, KB]


def test_several_results_count_together() -> None:
    graph = aten(lambda x: x.max(dim=1), square())
    (node,) = [n for n in graph.nodes if n.name == "max_1"]
    assert nbytes(node) == 16 * (4 + 8)


# Against the allocator.

MARGIN = 0.01
"""Share of the measured peak by which the timeline may be off: scalars that PyTorch makes on the way."""


def case(function: Callable[..., Any], inputs: str, training: bool) -> Case:
    return Case("case", lambda: function, InputSpec.parse_many(inputs), training=training)


def predicted(case: Case, graph: GraphName, stage: Stage) -> int:
    points = price_case(case, target_named("cpu")).program.memory
    return max(point.live_bytes for point in points if (point.graph, point.stage) == (graph, stage))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / 4, -1) @ v


def unread(x: Tensor) -> Tensor:
    x.exp()
    return x.sin()


def read_through_a_view(x: Tensor) -> Tensor:
    """The tensor behind the transpose lives while the chain beside it is computed."""
    shown = x.exp().t()
    return x.sin().cos() * shown[:1]


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: x.exp().sin().cos(), "fp32[N=300,M=400]"),
        (lambda x: (x.exp() + x.sin()) * x.cos(), "fp32[N=300,M=400]"),
        (attention, "fp32[B=2,N=256,d=16],fp32[B=2,N=256,d=16],fp32[B=2,N=256,d=16]"),
        (lambda x, w: F.gelu(x @ w) @ w.t(), "fp32[N=256,K=64],fp32[K=64,M=512]"),
        (read_through_a_view, "fp32[N=300,M=300]"),
        (lambda x: (x.exp(), x.sin(), x.cos()), "fp32[N=300,M=400]"),
        (unread, "fp32[N=300,M=400]"),
    ],
    ids=["chain", "branches", "attention", "two products", "view", "results", "unread"],
)
def test_the_peak_of_eager_is_the_allocators(function: Callable[..., Any], inputs: str) -> None:
    subject = case(function, inputs, training=False)
    tensors = make_inputs(subject, seed=0, device="cpu", requires_grad=False)

    def call() -> None:
        with torch.no_grad():
            function(*tensors)

    call()
    measured = peak_bytes(call)
    assert predicted(subject, "forward", "before") == pytest.approx(measured, rel=MARGIN)


@pytest.mark.parametrize(("impl", "stage"), [("eager", "before"), ("tilewright", "after")])
def test_the_peak_of_a_training_step_is_the_allocators(impl: str, stage: Stage) -> None:
    subject = transformer_block.case(D=64, H=4, B=4, S=128)
    ways = Subject(subject)
    ways.call(impl)
    measured = peak_bytes(lambda: ways.call(impl))
    # The caller holds the result of forward while backward runs.
    result = 4 * 4 * 128 * 64
    assert predicted(subject, "backward", stage) + result == pytest.approx(measured, rel=MARGIN)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: (x - x.amax(1, keepdim=True)).exp(), "fp32[N=300,M=400]"),
        (lambda x, w: F.gelu(x @ w) @ w.t(), "fp32[N=256,K=64],fp32[K=64,M=512]"),
        (lambda x, w: F.layer_norm(F.gelu(x @ w), (512,)).sin() @ w.t(), "fp32[N=256,K=64],fp32[K=64,M=512]"),
    ],
    ids=["softmax", "two products", "norm"],
)
def test_the_peak_of_the_plan_is_the_pools(function: Callable[..., Any], inputs: str) -> None:
    subject = case(function, inputs, training=False)
    ways = Subject(subject)
    ways.call("tilewright")
    measured = peak_bytes(lambda: ways.call("tilewright"))
    assert predicted(subject, "forward", "after") == pytest.approx(measured, rel=MARGIN)


def test_a_saved_view_shares_what_forward_made() -> None:
    # gelu's operand is saved as [B, S, F] and as the [B·S, F] that the product gave.
    subject = mlp.case(dimension=32, layers=2, batch=8)
    points = price_case(subject, target_named("cpu")).program.memory
    first = next(point for point in points if (point.graph, point.stage) == ("backward", "before"))
    # Two gelu operands and the input of the second layer are saved; the first step makes a gradient.
    assert first.live_bytes == 4 * 4 * 8 * 32


MIB = 1024**2


def distances(function: Callable[..., Tensor], *inputs: Tensor) -> dict[str, Distances]:
    """The reuse distances of each operator's operands, without views."""
    nodes = [node for node in aten(function, *inputs).nodes if node.op == "call_function" and not calls.is_view(node)]
    nodes = [node for node in nodes if calls.operator_name(node.target) != "getitem"]
    found = reuse_distances([(list(node.all_input_nodes), [node]) for node in nodes])
    return {calls.operator_name(node.target): some for node, some in zip(nodes, found, strict=True)}


def test_the_bytes_between_two_uses_are_counted() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x.relu(), y.exp().t())

    size = 8 * 4 * 4
    found = distances(function, torch.ones(8, 4), torch.ones(4, 8))
    # A run touches seven tensors: x, relu, y, exp, and the two and the result of the sum.
    assert found["relu"] == found["exp"] == ((size, 7 * size),)
    # Between the making of relu and its use, y and exp were touched; exp was the last, and is read through a view.
    assert found["add"] == ((size, 3 * size), (size, size))


def test_each_result_of_a_call_is_touched_when_it_is_made() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.max(x, 0)[0].exp()

    # Beside the four maxima their places are made, 32 bytes.
    assert distances(function, torch.ones(64, 4))["exp"] == ((16, 16 + 32),)


def test_what_left_the_cache_takes_longer_to_read() -> None:
    h200 = profile_for("h200")

    def us(*found: tuple[int, int]) -> float:
        return predicted_us(Work("pointwise", 8 * MIB, 8 * MIB, distances=found), h200)

    near, far = (8 * MIB, 16 * MIB), (8 * MIB, 512 * MIB)
    assert us() == us(near) < us(far)
    assert us(near) < us((4 * MIB, 16 * MIB), (4 * MIB, 512 * MIB)) < us(far)
