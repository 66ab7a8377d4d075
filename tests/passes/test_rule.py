"""Rules: what a pattern fits, and what applying one does to a graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.passes.graphs import aten, calls, run
from tilewright.graph.insert import insert_call
from tilewright.hardware.target import target_named
from tilewright.passes.rule import Value, call, gpu, matches, rule
from tilewright.passes.stage import Stage, applied
from tilewright.records.errors import Refusal

ops: Any = torch.ops.aten
CPU, H200 = target_named("cpu"), target_named("h200")
X, W = torch.randn(3, 4), torch.randn(4, 4)
PRODUCT = call("matmul", "x", "w", name="product", alone=True, through=("view",))
FITS: dict[str, tuple[Any, Callable[..., Tensor], int]] = {
    "an operator": (call(ops.mm.default, "x", "w"), lambda x, w: x @ w, 1),
    "another operator": (call(ops.bmm.default, "x", "w"), lambda x, w: x @ w, 0),
    "one of two": (call((ops.sin.default, "exp"), "x"), lambda x, w: x.exp(), 1),
    "either order": (call("add", PRODUCT, "b"), lambda x, w: x + x @ w, 1),
    "two ways": (call("mul", "a", "b"), lambda x, w: x * w[:3], 2),
    "one way": (call("sub", PRODUCT, "b"), lambda x, w: x - x @ w, 0),
    "alternatives": (call("exp", (call("sin", "x"), PRODUCT)), lambda x, w: (x @ w).exp(), 1),
    "through views": (call("exp", PRODUCT), lambda x, w: (x @ w).view(4, 3).view(12).exp(), 1),
    "another reader": (call("exp", PRODUCT), lambda x, w: (y := x @ w).exp() + y, 0),
    "another reader of a view": (call("exp", PRODUCT), lambda x, w: (y := (x @ w).view(12)).exp() + y, 0),
    "twice the same": (call("mul", "x", "x"), lambda x, w: x * x, 2),
    "two that differ": (call("mul", "x", "x"), lambda x, w: x * w[:3], 0),
    "a default": (call("add", "x", "y"), lambda x, w: torch.add(x, x, alpha=1), 2),
    "another value than the default": (call("add", "x", "y"), lambda x, w: torch.add(x, x, alpha=2), 0),
    "further arguments": (call("add", "x", "y", ...), lambda x, w: torch.add(x, x, alpha=2), 2),
    "by name": (call("add", "x", "y", alpha=2), lambda x, w: torch.add(x, x, alpha=2), 2),
    "a number is no tensor": (call("add", "x", "y"), lambda x, w: x + 2, 0),
    "a number": (call("add", "x", Value("n", (int, float))), lambda x, w: x + 2, 1),
    "a condition": (call("pow", "x", lambda n: n == 2), lambda x, w: x**2.0, 1),
    "a number of another type": (call("leaky_relu", "x", 0), lambda x, w: ops.leaky_relu(x, 0.0), 0),
}


@pytest.mark.parametrize("name", FITS)
def test_what_a_pattern_fits(name: str) -> None:
    pattern, function, ways = FITS[name]
    found = [m for node in aten(function, X, W).nodes for m in matches(pattern, node)]
    assert len(found) == ways


def spelled(x: Tensor) -> tuple[Tensor, ...]:
    return x.pow(2), torch.pow(x, 2), torch.pow(input=x, exponent=2), x**2, torch.pow(exponent=2, input=x)


def test_a_canonical_name_fits_every_spelling_before_autograd() -> None:
    graph = fx.symbolic_trace(spelled).graph
    for node in graph.nodes:
        node.meta["example_value"] = X
    pattern = call("pow", input="x", exponent=2)
    found = [m for node in graph.nodes for m in matches(pattern, node)]
    assert len(found) == 5 and {m["x"].name for m in found} == {"x"}


@rule(call(ops.exp.default, call(ops.log.default, "x", name="log")), on=gpu, reason="exp undoes log", by="inverses")
def undo_logarithms(node: fx.Node, x: fx.Node) -> fx.Node:
    return insert_call(node, ops.abs.default, x)


def test_a_rule_rewrites_erases_and_says_so() -> None:
    graph = aten(lambda x: ((y := x.log()).exp() + y, (x + 1).log().exp()), X.abs())
    with applied() as ran:
        decisions = Stage("one", "", "", (undo_logarithms,)).run(graph, H200, name="inference")
    # The first logarithm has another reader.
    assert calls(graph) == ["log.default", "abs.default", "add.Tensor", "add.Tensor", "abs.default"]
    assert [(d.graph, d.producer, d.consumer, d.passed_by, d.reason) for d in decisions] == [
        ("inference", "x_1", "abs_2", "inverses", "exp undoes log"),
        ("inference", "add_1", "abs_1", "inverses", "exp undoes log"),
    ]
    assert [one.name for one in ran] == ["undo_logarithms"] and "- exp = exp.default(log)" in ran[0].changes()
    torch.testing.assert_close(run(graph, X.abs())[1], X.abs() + 1)


def test_a_rule_runs_where_it_is_for_and_not_where_it_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = aten(lambda x: x.log().exp(), X.abs())
    assert undo_logarithms(graph, CPU) == [] and "exp.default" in calls(graph)
    monkeypatch.setenv("TILEWRIGHT_SKIP", "undo_logarithms")
    Stage("one", "", "", (undo_logarithms,)).run(graph, H200)
    assert "exp.default" in calls(graph)


def test_calls_are_not_moved_over_a_write() -> None:
    graph = aten(lambda x: (y := x.clone(), z := y.log(), y.mul_(2), z.exp())[-1], X.abs())
    assert undo_logarithms(graph, H200) == [] and "exp.default" in calls(graph)


@rule(
    call(ops.add.Tensor, call("mul", "x", "y"), "z"), where=lambda z: {"w": z.all_input_nodes[0]} if z.users else None
)
def bound_by_the_condition(node: fx.Node, w: fx.Node) -> fx.Node:
    return w


def test_a_condition_may_bind() -> None:
    graph = aten(lambda x: x * x + x.exp(), X)
    bound_by_the_condition(graph, CPU)
    assert calls(graph) == [] and torch.equal(run(graph, X), X)


@rule(call(ops.exp.default, call(ops.exp.default, "x")), reason="simpler")
def simpler(node: fx.Node, x: fx.Node) -> fx.Node:
    return insert_call(node, ops.exp.default, x)


def test_the_tree_nearest_the_results_is_found_first() -> None:
    graph = aten(lambda x: x.exp().exp().exp(), X)
    (decision,) = simpler(graph, CPU)
    assert calls(graph) == ["exp.default"] * 2 and decision.producer == "exp"


@rule(call(ops.relu.default, "x"), reason="another name")
def renamed(node: fx.Node, x: fx.Node) -> fx.Node:
    return insert_call(node, ops.abs.default, x)


def test_decisions_name_calls_that_are_in_the_graph() -> None:
    graph = aten(lambda x: torch.relu(torch.relu(x)), X)
    names = [name for decision in renamed(graph, CPU) for name in (decision.producer, decision.consumer)]
    assert set(names) <= {node.name for node in graph.nodes} and len(names) == 4


@rule(call(ops.relu.default, "x"), reason=lambda x: f"of {x.name}", refused="stays: ")
def refuse_small(node: fx.Node, x: fx.Node) -> fx.Node:
    new = insert_call(node, ops.abs.default, x)
    if x.meta["val"].numel() < 4:
        raise Refusal("small")
    return new


def test_a_refusal_is_a_decision_and_leaves_the_graph_as_it_was() -> None:
    graph = aten(lambda x: torch.relu(x[0, :2]).sum() + torch.relu(x).sum(), X)
    decisions = refuse_small(graph, CPU)
    assert [(d.verdict, d.consumer, d.reason) for d in decisions] == [
        ("refused", "relu", "stays: small"), ("taken", "abs_1", "of x_1")
    ]  # fmt: skip
    assert sorted(calls(graph)) == sorted(
        ["select.int", "slice.Tensor", "relu.default", "sum.default", "abs.default", "sum.default", "add.Tensor"]
    )
