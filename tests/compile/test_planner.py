"""Explanations match runs: one planner makes the plan of both."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from examples import attention, gelu_dropout_residual, transformer_block
from tests.passes import norms
from tilewright.compile.plan import GraphPlan
from tilewright.compile.price import price_case
from tilewright.hardware.profiles import nearest_profile
from tilewright.hardware.target import Target, target_named, target_of
from tilewright.passes.fusion import Region
from tilewright.records.case import Case, InputSpec
from tilewright.records.errors import CaptureError
from tilewright.runtime.assemble import Scheduled
from tilewright.verbs.subject import Subject

STREAM = "fp32[512,4096],fp32[512,4096]"


def shown(graphs: list[GraphPlan]) -> list[tuple[str, list[tuple[str, str]], list[str]]]:
    return [(graph.name, list(graph.launches()), list(graph.sources.values())) for graph in graphs]


@pytest.mark.parametrize(
    "case",
    [
        transformer_block.case(D=32, H=4, B=2, S=16),
        replace(gelu_dropout_residual.case(N=32, M=48), training=True),
        attention.case(B=2, N=64, d=16),
    ],
    ids=lambda case: case.name,
)
def test_the_compiled_program_is_the_plan_that_explain_prices(case: Case) -> None:
    priced = price_case(case, Target(target_of(torch.device("cpu")).profile))
    subject = Subject(case)
    subject.call("tilewright")
    compiled = [graph.plan for graph in subject.recording.graphs]
    assert shown(compiled) == shown(priced.plan.graphs)
    ran = [step.name for graph in subject.recording.graphs for step in graph.executable.kernels]
    assert ran == [name for _, name, kernel in priced.plan.launches() if kernel == "kernel"] and ran
    listed = [o.name for o in priced.program.operators if o.stage == "after" and o.target == "kernel"]
    assert sorted(ran) == sorted(listed)


def test_what_is_explained_for_a_gpu_is_what_the_backend_would_assemble_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the launches themselves: without a GPU nothing can be built for one, and PyTorch takes over."""
    pytest.importorskip("triton")
    h200 = target_named("h200")
    case = Case("stream", lambda: norms.Residual(torch.float32, 4096), InputSpec.parse_many(STREAM), training=True)
    explained = price_case(case, h200).plan
    assembled: list[list[str]] = []

    def stop(scheduled: Scheduled, *_: object) -> None:
        assembled.append([unit.name for unit in scheduled.units])
        if len(assembled) == 2:
            raise CaptureError("there is no GPU here")

    monkeypatch.delenv("TILEWRIGHT_STRICT", raising=False)
    monkeypatch.setattr("tilewright.backend.target_of", lambda _: h200)
    monkeypatch.setattr("tilewright.backend.assemble", stop)
    Subject(case).call("tilewright")
    assert assembled == [[unit.name for unit in graph.units] for graph in explained.graphs]
    assert "add_norm" in assembled[0] and any("norm_backward" in name for name in assembled[1])


@pytest.mark.parametrize(
    ("name", "capability", "nearest"),
    [
        ("NVIDIA GeForce RTX 4090", "8.9", "rtx4090"),
        ("NVIDIA H100 80GB HBM3", "9.0", "h100"),
        ("NVIDIA GB200", "10.0", "b200"),
        ("NVIDIA GeForce RTX 5060", "12.0", "rtx5090"),
        ("NVIDIA L4", "8.9", "rtx4090"),
        ("Tesla V100", "7.0", "2080ti"),
    ],
)
def test_a_gpu_that_nobody_measured_is_priced_by_the_nearest_datasheet(
    name: str, capability: str, nearest: str
) -> None:
    found = nearest_profile(name, capability)
    assert found.name == nearest and found.capability == capability


class Dropping(nn.Module):
    """Equal layers with dropout, [B, D] → [B, D]."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.1)
        return x


def test_layers_that_draw_other_numbers_share_their_kernels() -> None:
    def drawing(layers: int) -> tuple[list[str], list[tuple[int, ...]]]:
        case = Case("drop", lambda: Dropping(layers), InputSpec.parse_many("fp32[128,256]"), training=True)
        graphs = price_case(case, target_named("h200")).plan.graphs
        found = [(g.sources[r.name], r.lowered.numbers) for g in graphs for r in g.fusion.regions if r.lowered.numbers]
        return [source for source, _ in found], [numbers for _, numbers in found]

    few, more = drawing(4), drawing(7)
    assert len(set(more[0])) == len(set(few[0])) < len(few[0]) < len(more[0])
    # One draw a layer, and each a number of its own.
    assert len({n for numbers in more[1] for n in numbers}) == 7


@pytest.mark.parametrize("slower", [False, True])
def test_chains_are_copied_unless_the_kernels_would_be_slower(slower: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """dz is read by a sum and, behind that sum, by a second kernel, which computes it again."""

    def chain(g: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        dz = g * torch.sigmoid(z)
        return dz - z * dz.sum()

    def sigmoids(regions: Sequence[Region]) -> int:
        return sum(step.name == "sigmoid" for region in regions for step in region.lowered.nest.steps)

    priced = (
        (lambda units, _: sigmoids([unit for unit in units if isinstance(unit, Region)]))
        if slower
        else (lambda *_: 1.0)
    )
    monkeypatch.setattr("tilewright.compile.planner.kernels_us", priced)
    case = Case("chain", lambda: chain, InputSpec.parse_many("fp32[1024,1024],fp32[1024,1024]"), training=False)
    (graph,) = price_case(case, target_named("h200")).plan.graphs
    assert bool(graph.copied) is not slower
    assert sigmoids(graph.fusion.regions) == (1 if slower else 2)


def test_a_chain_is_copied_with_the_views_through_which_it_is_read() -> None:
    def halves(g: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        dz = g * torch.sigmoid(z)
        a, b = dz.unbind(0)
        return a * b - z * dz.sum()

    case = Case("halves", lambda: halves, InputSpec.parse_many("fp32[2,1024,1024],fp32[1024,1024]"), training=False)
    (graph,) = price_case(case, target_named("h200")).plan.graphs
    assert graph.copied and not any("failed" in decision.reason for decision in graph.fusion.decisions)
