"""Graphs that are compiled while a program is recorded: their costs in the run, their CPU kernels in the trace."""

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tilewright import backend
from tilewright.profiling.block import profile
from tilewright.profiling.compiled import merged, program_of
from tilewright.records.program import Program
from tilewright.store.query import query

pytestmark = pytest.mark.usefixtures("home")


def rows(run: Path, sql: str) -> list[tuple[Any, ...]]:
    return query(run, sql)[1]


def training() -> Callable[[], None]:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))
    compiled = torch.compile(model, backend=backend.backend, dynamic=False)
    rule = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(32, 64)

    def step() -> None:
        rule.zero_grad()
        compiled(x).square().sum().backward()
        rule.step()

    return step


def test_a_program_travels_between_processes() -> None:
    with backend.recording() as record:
        training()()
    program = program_of(record)
    assert {region.graph for region in program.regions} == {"forward", "backward"}
    assert all(region.cost.bytes > 0 and region.floor_us is None for region in program.regions)
    assert merged([pickle.loads(pickle.dumps(program))]) == program


def test_what_ranks_share_stands_once() -> None:
    with backend.recording() as record:
        training()()
    program = program_of(record)
    other = replace(program, regions=[replace(program.regions[0], name="of the second rank")])
    both = merged([program, other])
    assert both is not None and len(both.regions) == len(program.regions) + 1
    assert merged([Program()]) is None


def test_what_cannot_be_priced_is_said_and_takes_nothing_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise ValueError("no such size\nin this graph")

    with backend.recording() as record:
        training()()
    monkeypatch.setattr("tilewright.graph.dims.symbolic_shapes", unknown)
    program = program_of(record)
    assert not program.regions
    assert {(it.what, it.why) for it in program.fallbacks} == {
        (f"the cost of a {name} graph", "ValueError: no such size") for name in ("forward", "backward")
    }


def test_a_recorded_block_has_the_kernels_their_time_and_cost() -> None:
    with profile(wait=1, warmup=1, active=3) as run:
        step = training()
        for _ in range(7):
            step()
    found = rows(
        run.path,
        """SELECT operator, calls, bytes, device_ns, provenance, source FROM operator_distance
           WHERE attributed_by = 'region' AND operator IN (SELECT name FROM region)""",
    )
    costs = dict(rows(run.path, "SELECT name, bytes FROM region"))
    assert {name for name, *_ in found} == costs.keys() and costs
    for name, calls, nbytes, took, provenance, source in found:
        assert (calls, nbytes, provenance) == (3, costs[name], "formula") and took > 0
        assert re.search(r"test_compiled\.py:\d+, layer \d: \w+$", source), source
    kinds = rows(run.path, "SELECT DISTINCT kind FROM operator_time WHERE name IN (SELECT name FROM region)")
    assert kinds == [("operator",)]


def test_regions_of_one_name_and_two_costs_have_none() -> None:
    """Two models may both have a `forward0_gelu`: whose kernel it was, nobody knows."""
    with profile(wait=1, warmup=1, active=2) as run:
        models = [torch.compile(nn.GELU(), backend=backend.backend, dynamic=False) for _ in range(2)]
        inputs = [torch.randn(64), torch.randn(4096)]
        for _ in range(6):
            with torch.no_grad():
                for model, x in zip(models, inputs, strict=True):
                    model(x)
            run.step()
    costs = rows(run.path, "SELECT name, count(DISTINCT bytes) FROM region GROUP BY name")
    assert [count for _, count in costs] == [2]
    found = rows(run.path, "SELECT bytes, provenance FROM operator_distance WHERE attributed_by = 'region'")
    assert found and set(found) == {(None, "unknown")}
