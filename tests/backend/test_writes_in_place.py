"""Writes to a part of an input: in place where that is all, and always with what eager leaves there, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.backend.compiling import compiled, tensors, twin
from tests.contract import called
from tests.tables import functions, programs
from tilewright.backend import Recording, recording
from tilewright.records.program import Decision

PLACE = torch.tensor([3])


def after_steps(function: Callable[..., Any], *inputs: Tensor, steps: int = 3) -> Recording:
    """Run `function` on the same inputs several times, compiled and eager; results and inputs must be the same bits."""
    mine, theirs = [twin(x) for x in inputs], [twin(x) for x in inputs]
    run = compiled(function)
    with recording() as record, torch.no_grad():
        for _ in range(steps):
            ours, expected = tensors(run(*mine)), tensors(function(*theirs))
            for x, y in zip([*ours, *mine], [*expected, *theirs], strict=True):
                assert x.stride() == y.stride()
                torch.testing.assert_close(x, y, rtol=0, atol=0)
    return record


def decisions(record: Recording) -> list[Decision]:
    return [d for graph in record.graphs for d in graph.plan.fusion.decisions if d.passed_by == "in place"]


def copied_whole(record: Recording) -> list[str]:
    """Calls that write all of an input, or make a second one."""
    nodes = called(record, "")
    found = [n for n in nodes if str(n.target) == "aten.copy_.default" and n.args[0].op == "placeholder"]
    made = ("index_put.", "index_copy.", "slice_scatter", "select_scatter")
    return [n.name for n in (*found, *(n for n in nodes if any(word in str(n.target) for word in made)))]


def cache() -> Tensor:
    return torch.randn(2, 3, 8, 4)


TABLE = Path(__file__).with_name("writes.txt")
PARTS, TURNED = (functions(TABLE, section, {"PLACE": PLACE}) for section in ("parts", "turned"))
WHOLE = programs(TABLE, "whole")


@pytest.mark.parametrize("name", PARTS)
def test_only_a_part_is_written(name: str) -> None:
    record = after_steps(PARTS[name], cache(), torch.randn(2, 3, 1, 4))
    assert not copied_whole(record)
    assert {d.verdict for d in decisions(record)} == {"taken"}


@pytest.mark.parametrize("name", TURNED)
def test_heads_and_places_changed_over_in_memory(name: str) -> None:
    record = after_steps(TURNED[name], cache().transpose(1, 2).contiguous().transpose(1, 2), torch.randn(2, 3, 1, 4))
    assert not copied_whole(record)


@pytest.mark.parametrize("name", WHOLE)
def test_where_the_old_value_is_needed_the_whole_is_copied(name: str) -> None:
    record = after_steps(WHOLE[name].function, cache(), torch.randn(2, 3, 1, 4))
    (decision,) = decisions(record)
    assert decision.verdict == "refused" and WHOLE[name].fields["reason"] in decision.reason


def test_an_expanded_input_is_refused_as_by_eager() -> None:
    with pytest.raises(RuntimeError, match="more than one element"), torch.no_grad():
        compiled(PARTS["by slice"])(torch.zeros(1, 3, 8, 4).expand(2, 3, 8, 4), torch.ones(2, 3, 1, 4))


def test_two_caches_in_one_memory() -> None:
    """Each a half of one tensor: the first is written, the second is read."""
    base, other = torch.randn(4, 3, 8, 4), torch.zeros(4, 3, 8, 4)
    other.copy_(base)
    k = torch.randn(2, 3, 1, 4)

    def function(a: Tensor, b: Tensor, k: Tensor) -> Tensor:
        a.index_copy_(2, PLACE, k)
        return b * 2

    run = compiled(function)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(run(base[:2], base[2:], k), function(other[:2], other[2:], k))
            torch.testing.assert_close(base, other, rtol=0, atol=0)


def test_a_view_into_a_larger_tensor_that_begins_elsewhere() -> None:
    by_slice = PARTS["by slice"]
    run = compiled(by_slice)
    for begin in (0, 1):
        base, other = torch.zeros(3, 3, 8, 4), torch.zeros(3, 3, 8, 4)
        k = torch.randn(2, 3, 1, 4)
        with torch.no_grad():
            torch.testing.assert_close(run(base[begin : begin + 2], k), by_slice(other[begin : begin + 2], k))
        torch.testing.assert_close(base, other, rtol=0, atol=0)


def test_a_buffer_in_training() -> None:
    """The written cache is read by what has a gradient."""

    def function(c: Tensor, k: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            c[:, :, 3:4] = k
        return (c * w).sin().sum(3)

    results = []
    for run in (compiled(function), function):
        torch.manual_seed(0)
        c, k, w = torch.randn(2, 3, 8, 4), torch.randn(2, 3, 1, 4), torch.randn(4, requires_grad=True)
        run(c, k, w).sum().backward()
        results.append((c, w.grad))
    torch.testing.assert_close(results[0], results[1])


def test_what_reads_before_runs_before_and_what_reads_after_runs_after() -> None:
    """Two caches, the one's old value is written to the other: their writes must not change places."""

    def function(a: Tensor, b: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = b.neg()
        b[:, :, 3:4] = a[:, :, 3:4]
        second = b.abs() + first
        a[:, :, 3:4] = k
        return second, a.neg(), b.neg()

    after_steps(function, cache(), cache(), torch.randn(2, 3, 1, 4))


def test_a_write_that_the_next_one_covers() -> None:
    """Nothing reads the value first written, so its kernel does not run, and nothing waits for it."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        x[::2].fill_(3)
        x.fill_(2)
        return x[::2], x + 1

    assert after_steps(function, torch.randn(6, 40)).graphs
