"""The one chooser: which of several offers is taken, by what, and what its decision says."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tests.passes.graphs import aten, calls
from tilewright.choose.chooser import chosen
from tilewright.graph.insert import insert_call
from tilewright.graph.insert import replace as replace_node
from tilewright.hardware.target import Target, target_named
from tilewright.kernels.offer import OURS, THEIRS, Offer
from tilewright.launch.race import Race
from tilewright.records import outcomes
from tilewright.records.outcomes import Outcome
from tilewright.records.program import Decision

H200 = target_named("h200")
PACKAGE = Path(__file__).parents[2] / "src/tilewright"


def graph_of_relu() -> fx.Graph:
    return aten(lambda x: torch.relu(x).sum(), torch.randn(3))


def decide(*given: dict[str, Any], target: Target = H200) -> tuple[Decision, list[str]]:
    """The decision between offers of one relu, each of which would write `abs`, and the graph's calls afterwards."""
    graph = graph_of_relu()
    (relu,) = graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)

    def write() -> fx.Node:
        new = insert_call(relu, torch.ops.aten.abs.default, relu.args[0])
        replace_node(relu, new)
        return new

    offers = [Offer(**{"kernel": "ours", "stands_for": "relu", "node": relu, "apply": write, **one}) for one in given]
    (decision,) = chosen("test", lambda graph, target: [offers])(graph, target) or ()
    return decision, calls(graph)


def race(times: dict[str, float] | None) -> Race:
    """A race of `times`, kept if there are any, whose alternatives fail."""
    found = Race((str(times),), torch.device("cpu"), ("emit",), lambda: pytest.fail("raced"))
    if times is not None:
        outcomes.keep(found.key, Outcome(times))
    return found


@pytest.mark.parametrize(
    ("offers", "verdict", "reason"),
    [
        ([{}], "taken", "ours in place of relu"),
        ([{"refusal": "it is Tuesday"}], "refused", "ours does not replace relu: it is Tuesday"),
        ([{"work": (5.0,), "instead": (8.0,)}], "taken", "5.0 µs predicted, against 8.0 µs"),
        ([{"work": (5.0,), "instead": (5.01,)}], "refused", "5.0 µs predicted, against 5.0 µs"),
        ([{"work": (5.0,), "instead": (8.0,), "least_us": 4.0}], "refused", "5.0 µs"),
        ([{"work": (7.0,), "instead": (8.0,), "clear": 0.8}], "refused", "7.0 µs"),
        # The one that gains more; what is refused does not count.
        ([{"work": (5.0,), "instead": (8.0,)}, {"work": (3.0,), "instead": (8.0,), "kernel": "B"}], "taken", "B in"),
        ([{"refusal": "no"}, {"work": (3.0,), "instead": (8.0,), "kernel": "B"}], "taken", "B in place"),
        ([{"refusal": "first"}, {"refusal": "second"}], "refused", "first"),
        ([{"unraced": "nobody knows"}], "refused", "ours does not replace relu: nobody knows"),
    ],
)
def test_the_best_possible_offer_is_taken_if_it_is_clearly_faster(
    offers: list[dict[str, Any]], verdict: str, reason: str
) -> None:
    decision, ran = decide(*offers)
    assert decision.verdict == verdict and reason in decision.reason and decision.passed_by == "test"
    assert ("abs.default" in ran) == (verdict == "taken") == ("relu.default" not in ran)


@pytest.mark.parametrize(
    ("times", "more", "verdict", "reason"),
    [
        ({THEIRS: 10.0, OURS: 9.0}, {}, "taken", "9.0 µs measured, 10.0 µs otherwise"),
        ({THEIRS: 10.0, OURS: 10.1}, {}, "taken", "10.1 µs measured"),
        ({THEIRS: 10.0, OURS: 11.0}, {"with_backward": True}, "tried and lost", "11.0 µs measured forward and"),
        ({THEIRS: 10.0}, {}, "refused", "its results differ by more than rounding"),
        ({THEIRS: 10.0, OURS: 9.0}, {"beside": (2.0,)}, "tried and lost", "11.0 µs measured with 2.0 pre"),
        # What a launch was predicted to take is not added to what it took.
        ({THEIRS: 10.0, OURS: 9.0}, {"work": (5.0,)}, "taken", "9.0 µs measured, 10.0"),
        ({THEIRS: 10.0, OURS: 11.0}, {"saves": (2.0,)}, "taken", "11.0 µs measured, 12.0 µs otherwise"),
        # A race outweighs what is known without one; without an outcome that stands.
        ({THEIRS: 10.0, OURS: 9.0}, {"unraced": "unknown"}, "taken", "9.0 µs measured"),
        (None, {"unraced": "unknown"}, "refused", "unknown"),
        (None, {}, "taken", "ours in place of relu"),
    ],
)
def test_a_race_decides(
    times: dict[str, float] | None,
    more: dict[str, Any],
    verdict: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    decision, _ = decide({"races": (race(times),), **more})
    assert decision.verdict == verdict and reason in decision.reason
    assert (decision.measured_us is not None) == ("µs measured" in reason and "with_backward" not in more)


def test_only_a_target_that_measures_races(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    runs: list[torch.device] = []

    def run(alternatives: Callable[[], object], device: torch.device, *limits: float) -> Outcome:
        runs.append(device)
        return Outcome({THEIRS: 10.0, OURS: 9.0})

    monkeypatch.setattr("tilewright.launch.race.run", run)
    one = Race(("once",), torch.device("cpu"), ("emit",), dict)
    for target, reason in ((H200, "unknown"), (replace(H200, measures=True), "9.0 µs"), (H200, "9.0 µs")):
        assert reason in decide({"races": (one,), "unraced": "unknown"}, target=target)[0].reason
    assert len(runs) == 1


def test_coefficients_of_another_architecture_are_said() -> None:
    priced = {"work": (5.0,), "instead": (8.0,)}
    assert decide(priced, target=target_named("b200"))[0].reason.endswith("timed on compute capability 9.0")
    assert "capability" not in decide(priced)[0].reason and "capability" not in decide(priced, target=CPU)[0].reason


CPU = target_named("cpu")


def test_what_depends_on_gradients_is_of_the_backward_graph() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.relu(x)

    graph = aten(function, torch.randn(3))
    next(iter(graph.nodes)).target = "tangents_1"
    (relu,) = graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    offers = [[Offer("ours", "relu", relu, lambda: relu, "no")]]
    (decision,) = chosen("test", lambda graph, target: offers)(graph, H200) or ()
    assert decision.graph == "backward"


def test_no_rewrite_prices_or_races() -> None:
    words = ("predicted_us(", "contest(", "is_faster(", '"tried and lost"')
    found = [
        f"{path.relative_to(PACKAGE)}: {word}"
        for path in sorted((PACKAGE / "passes").rglob("*.py"))
        for word in words
        if word in path.read_text("utf-8")
    ]
    assert found == []
