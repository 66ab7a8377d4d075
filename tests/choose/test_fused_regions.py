"""Outcomes of races are kept, followed by every later compilation, and listed in the decisions."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.passes.graphs import aten
from tilewright.choose import fused_regions
from tilewright.choose.fused_regions import APART, FUSED, Operands, race_regions, settle
from tilewright.hardware.profiles import profile_for
from tilewright.hardware.target import Target, target_named
from tilewright.passes.fusion import Fusion, Region, fuse
from tilewright.passes.schedule import schedule
from tilewright.records import outcomes
from tilewright.records.errors import CompilerError
from tilewright.records.outcomes import Outcome

WON, LOST = Outcome({FUSED: 10.0, APART: 30.0}), Outcome({FUSED: 30.0, APART: 10.0})
CPU = target_named("cpu")
MEASURING = replace(CPU, measures=True)
KINDS = ("pointwise", "rows, two passes", "rows, three passes")


def softmax(x: Tensor) -> Tensor:
    e = (x - x.amax(1, keepdim=True)).exp()
    return e / e.sum(1, keepdim=True)


def proposal(width: int = 8, function: Callable[..., Any] = softmax) -> Fusion:
    return fuse(aten(function, torch.zeros(5, width)), "forward", target_named("cpu"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(outcomes, "_unsaved", {})
    yield tmp_path / "cache"


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Races with a set outcome, counted."""
    state: dict[str, Any] = {"outcome": WON, "count": 0}

    def fixed(pairs: Sequence[tuple[Region, Sequence[Region]]]) -> list[Outcome]:
        state["count"] += len(pairs)
        return [state["outcome"] for _ in pairs]

    monkeypatch.setattr(fused_regions, "race_regions", fixed)
    yield state


def test_prediction_stands_where_nothing_was_measured(races: dict[str, Any]) -> None:
    proposed = proposal()
    settled = settle(proposed, CPU)
    assert settled.regions == proposed.regions and settled.decisions == proposed.decisions
    assert races["count"] == 0 and all(d.measured_us is None for d in settled.decisions)


def test_a_fusion_that_wins_stays_with_its_time(races: dict[str, Any]) -> None:
    proposed = proposal()
    settled = settle(proposed, MEASURING)
    assert settled.regions == proposed.regions
    assert {(d.verdict, d.measured_us) for d in settled.decisions} == {("taken", 10.0)}


def test_a_fusion_that_loses_is_taken_apart_and_says_so(races: dict[str, Any]) -> None:
    races["outcome"] = LOST
    proposed = proposal()
    settled = settle(proposed, MEASURING)
    assert [len(region.members) for region in settled.regions] == [1] * 5
    for row, before in zip(settled.decisions, proposed.decisions, strict=True):
        assert (row.producer, row.consumer, row.source) == (before.producer, before.consumer, before.source)
        assert (row.verdict, row.bytes_saved, row.measured_us) == ("tried and lost", 0, 30.0)
        assert row.reason == "one kernel took 30 µs, one each 10 µs"


def test_what_was_taken_apart_still_runs(races: dict[str, Any]) -> None:
    graph = aten(softmax, torch.zeros(5, 8))
    races["outcome"] = LOST
    units = schedule(graph, settle(fuse(graph, "forward", target_named("cpu")), MEASURING).regions)
    assert sum(isinstance(unit, Region) for unit in units) == 5


@pytest.mark.parametrize("outcome", [WON, LOST])
def test_a_verdict_is_raced_once_and_followed_ever_after(outcome: Outcome, races: dict[str, Any]) -> None:
    races["outcome"] = outcome
    first = settle(proposal(), MEASURING)
    for measure in (True, False):
        again = settle(proposal(), replace(CPU, measures=measure))
        assert again.decisions == first.decisions
        assert [len(r.members) for r in again.regions] == [len(r.members) for r in first.regions]
    assert races["count"] == 1


def test_another_size_and_other_threads_are_other_races(races: dict[str, Any]) -> None:
    settle(proposal(8), MEASURING)
    settle(proposal(9), MEASURING)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        settle(proposal(8), MEASURING)
    finally:
        torch.set_num_threads(threads)
    assert races["count"] == 3


def test_names_do_not_matter_to_a_verdict(races: dict[str, Any]) -> None:
    def renamed(values: Tensor) -> Tensor:
        return softmax(values.view(5, 8))

    settle(proposal(), MEASURING)
    settle(proposal(function=renamed), MEASURING)
    assert races["count"] == 1


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '{"fused": "x", "apart": 2}', '{"fused": NaN}'])
def test_a_damaged_verdict_is_raced_again(content: str, races: dict[str, Any], own_cache: Path) -> None:
    first = settle(proposal(), MEASURING)
    (entry,) = own_cache.rglob("*.race.json")
    entry.write_text(content)
    assert all(d.measured_us is None for d in settle(proposal(), CPU).decisions)
    assert settle(proposal(), MEASURING).decisions == first.decisions
    assert races["count"] == 2 and json.loads(entry.read_text()) == {"fused": 10.0, "apart": 30.0}


def test_a_verdict_that_cannot_be_kept_holds_for_this_process(
    races: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file" / "cache"))
    races["outcome"] = LOST
    first = settle(proposal(), MEASURING)
    assert {d.verdict for d in first.decisions} == {"tried and lost"}
    assert settle(proposal(), CPU).decisions == first.decisions
    assert races["count"] == 1


def test_single_operators_are_not_raced(races: dict[str, Any]) -> None:
    settle(proposal(function=lambda x: x.exp() @ x.t()), MEASURING)
    assert races["count"] == 0


def test_a_race_times_both_sides_of_it() -> None:
    proposed = proposal(512)
    settled = settle(proposed, MEASURING)
    times = {d.measured_us for d in settled.decisions}
    assert len(times) == 1 and all(us is not None and 0 < us < 1e6 for us in times)


def test_a_race_sees_views_between_its_parts() -> None:
    def program(x: Tensor) -> Tensor:
        return (x.exp().t() * 2).sin().t() + 1

    (region,) = proposal(16, program).regions
    parts = fused_regions.split_region(region)
    assert parts is not None and len(parts) > 2
    (outcome,) = race_regions([(region, parts)])
    assert set(outcome.times_us) == {FUSED, APART} and min(outcome.times_us.values()) > 0


def test_both_sides_of_a_race_read_one_value_whole_or_as_a_view() -> None:
    x, view, turned, _, _ = aten(lambda x: x.view(8, 5).t().sin(), torch.zeros(5, 8)).nodes
    values = Operands()
    assert torch.equal(values[turned], values[x].view(8, 5).t())
    assert values[view].data_ptr() == values[x].data_ptr() and not values[x].eq(0).all()


def test_a_race_of_an_expanded_operand() -> None:
    """The gradient of a mean: all elements of a row at one address."""
    gradient = torch.zeros(5, 1).expand(5, 8)
    (region,) = fuse(aten(lambda g, x: (g / 8 * x).sin(), gradient, torch.zeros(5, 8)), "forward", CPU).regions
    parts = fused_regions.split_region(region)
    assert parts is not None
    (outcome,) = race_regions([(region, parts)])
    assert set(outcome.times_us) == {FUSED, APART}


def test_a_race_indexes_a_table_of_one_row() -> None:
    def looked_up(ids: Tensor, table: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, table).sin()

    (region,) = fuse(aten(looked_up, torch.zeros(5, dtype=torch.long), torch.zeros(1, 8)), "forward", CPU).regions
    parts = fused_regions.split_region(region)
    assert parts is not None
    (outcome,) = race_regions([(region, parts)])
    assert set(outcome.times_us) == {FUSED, APART}


def test_a_race_without_a_compiler_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompilerError, match="'no-such-compiler' is not on PATH; install g\\+\\+ or set CXX"):
        settle(proposal(), MEASURING)


def test_what_prediction_tells_is_not_raced(races: dict[str, Any]) -> None:
    """A softmax in one kernel moves a fifth of what its operators move; on a device whose kernels were timed."""
    told = Target(replace(profile_for("cpu"), kernel_times=dict.fromkeys(KINDS, (0.0, 0.0, 1.0, 1.0, *[0.0] * 6))))
    settle(proposal(4096), replace(told, measures=True))
    assert races["count"] == 0
    close = Target(replace(profile_for("cpu"), kernel_times=dict.fromkeys(KINDS, (*[0.0] * 9, 1.0))))
    settle(proposal(4096), replace(close, measures=True))
    assert races["count"] == 1
