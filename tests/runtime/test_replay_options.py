"""How CUDA graphs are asked for, what is told where there can be none, and what a recording is told of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from tilewright import backend as wiring
from tilewright.backend import Recording, backend, recording
from tilewright.capture.aot import Boxed, CallableGraph
from tilewright.capture.cuda_graph import written_inputs
from tilewright.records import errors
from tilewright.records.program import Decision

ASKING = [{"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"options": {"cuda_graphs": True}}]
NOT_ASKING = [{}, {"mode": "default"}, {"mode": "max-autotune-no-cudagraphs"}, {"options": {"cuda_graphs": False}}]


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_warned", set())
    monkeypatch.delenv("TILEWRIGHT_STRICT", raising=False)


def about_replay(record: Recording) -> list[Decision]:
    return [d for d in record.decisions if d.passed_by == "replay"]


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize("asking", ASKING, ids=str)
def test_on_a_cpu_there_is_nothing_to_replay(asking: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with recording() as record:
        call = torch.compile(doubled, backend="tilewright", **asking)
        assert torch.equal(call(torch.ones(3)), torch.full((3,), 2.0))
    (decision,) = about_replay(record)
    assert (decision.graph, decision.verdict) == ("forward", "impossible")
    assert decision.reason.endswith("is on the CPU") and "test_replay_options.py" in str(decision.source)
    said = capsys.readouterr().err
    assert said.count("is not replayed as a CUDA graph: ") == 1 and "the forward graph at test_replay" in said


@pytest.mark.parametrize("asking", NOT_ASKING, ids=str)
def test_nobody_who_did_not_ask_is_told(asking: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with recording() as record:
        torch.compile(doubled, backend="tilewright", **asking)(torch.ones(3))
    assert about_replay(record) == [] and capsys.readouterr().err == ""


def test_strictly_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_STRICT", "1")
    call = torch.compile(doubled, backend=backend, mode="reduce-overhead")
    with pytest.raises(BackendCompilerFailed, match=r"is not replayed as a CUDA graph: .* on the CPU"):
        call(torch.ones(3))


@pytest.mark.parametrize(
    ("asking", "line"),
    [
        (
            {"options": {"cuda_graph": True}},
            "the backend has the options cuda_graphs, hand_written, and none named cuda_graph",
        ),
        ({"mode": "reduced-overhead"}, "max-autotune-no-cudagraphs, and none named reduced-overhead"),
    ],
)
def test_what_does_not_exist(
    asking: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = torch.compile(doubled, backend="tilewright", **asking)
    assert torch.equal(call(torch.ones(3)), torch.full((3,), 2.0))
    assert line in capsys.readouterr().err
    torch._dynamo.reset()
    monkeypatch.setenv("TILEWRIGHT_STRICT", "1")
    with pytest.raises(BackendCompilerFailed, match=f"UsageError: .*{line}"):
        call(torch.ones(3))


class Normed(nn.Module):
    """Parameters, a buffer that training writes to, and an input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.linear(x))
        return result


class Told:
    """In place of `Replay`: what it is told."""

    made: list[Told]

    def __init__(
        self, run: Boxed, graph: CallableGraph, refuse: Callable[[str], None], forward: Told | None = None
    ) -> None:
        self.run, self.graph, self.forward, self.refuse = run, graph, forward, refuse
        self.addresses: list[list[int]] = []
        Told.made.append(self)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        self.addresses.append([args[i].data_ptr() for i in self.graph.static])
        return self.run(args)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    Told.made = []
    monkeypatch.setattr(wiring, "obstacle", lambda graph: None)
    monkeypatch.setattr(wiring, "Replay", Told)
    return Told.made


def test_what_a_recording_is_told_in_training(told: list[Told]) -> None:
    model = Normed()
    call = torch.compile(model, backend="tilewright", mode="reduce-overhead")
    with recording() as record:
        for _ in range(3):
            call(torch.randn(5, 4)).sum().backward()
    forward, backward = told
    assert (forward.graph.kind, backward.graph.kind) == ("forward", "backward")
    assert forward.forward is None and backward.forward is forward
    assert [(d.graph, d.verdict) for d in about_replay(record)] == [("forward", "taken"), ("backward", "taken")]
    # In each call the very parameters and buffers, never the input.
    kept = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert len(forward.addresses) == 3 and set(forward.addresses[0]) <= kept
    assert {p.data_ptr() for p in model.parameters()} <= set(forward.addresses[0])
    written = [b for b in model.norm.buffers() if b.is_floating_point()]
    assert len(written) == 2 and {b.data_ptr() for b in written} <= set(forward.addresses[0])
    # All but the gradient that comes in.
    assert len(backward.graph.static) == len(backward.graph.module.graph.find_nodes(op="placeholder")) - 1


def test_a_backward_is_recorded_without_the_gradients_that_do_not_come(told: list[Told]) -> None:
    def scored(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = x.sin()
        return scores.sum(), scores

    call = torch.compile(scored, backend="tilewright", mode="reduce-overhead")
    steps = [torch.randn(5, 4, requires_grad=True) for _ in range(3)]
    for x, uses_scores in zip(steps, (False, True, False), strict=True):
        loss, scores = call(x)
        (loss + scores.square().sum() if uses_scores else loss).backward()
        expected = x.detach().cos() * (1 + 2 * uses_scores * x.detach().sin())
        torch.testing.assert_close(x.grad, expected)
    forward, without, whole = told
    assert [one.forward for one in told] == [None, forward, forward]
    # The gradient of the loss alone; and that of the scores.
    for made, calls, tangents in ((without, 2, 1), (whole, 1, 2)):
        inputs = made.graph.module.graph.find_nodes(op="placeholder")
        assert len(made.addresses) == calls and len(inputs) - len(made.graph.static) == tangents


def test_what_a_recording_is_told_in_inference(told: list[Told]) -> None:
    model = Normed().eval()
    call = torch.compile(model, backend="tilewright", mode="reduce-overhead")
    with torch.no_grad():
        call(torch.randn(5, 4))
    (only,) = told
    assert only.graph.kind == "inference" and only.forward is None
    assert set(only.addresses[0]) >= {p.data_ptr() for p in model.parameters()}
    assert len(only.graph.static) == len(only.graph.module.graph.find_nodes(op="placeholder")) - 1


def test_what_calls_show_is_noted(told: list[Told], capsys: pytest.CaptureFixture[str]) -> None:
    with recording() as record:
        torch.compile(doubled, backend="tilewright", mode="reduce-overhead")(torch.ones(3))
        told[0].refuse("one of its operators waits for the device")
    assert [d.verdict for d in about_replay(record)] == ["taken", "tried and lost"]
    assert "not replayed as a CUDA graph: one of its operators waits for the device" in capsys.readouterr().err


def test_a_backward_with_an_obstacle_leaves_its_forward_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[tuple[str, bool]] = []

    def replay(run: Boxed, graph: CallableGraph, *_: Any, is_refused: bool = False) -> Boxed:
        made.append((graph.kind, is_refused))
        return run

    monkeypatch.setattr(wiring, "obstacle", lambda graph: "it is odd" if graph.kind == "backward" else None)
    monkeypatch.setattr(wiring, "Replay", replay)
    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: x.sin(), backend="tilewright", mode="reduce-overhead")(x).sum().backward()
    assert made == [("forward", False), ("backward", True)]
    assert "the backward graph at" in capsys.readouterr().err


def test_a_forward_with_an_obstacle_says_it_once_for_both(capsys: pytest.CaptureFixture[str]) -> None:
    with recording() as record:
        x = torch.ones(3, requires_grad=True)
        torch.compile(lambda x: x.sin(), backend="tilewright", mode="reduce-overhead")(x).sum().backward()
    assert x.grad is not None and len(about_replay(record)) == 1
    assert capsys.readouterr().err.count("is not replayed") == 1


def test_a_graph_with_sizes_of_each_call_is_asked_for_once(told: list[Told]) -> None:
    call = torch.compile(doubled, backend="tilewright", mode="reduce-overhead", dynamic=True)
    for size in (3, 5, 7):
        assert torch.equal(call(torch.ones(size)), torch.full((size,), 2.0))
    (only,) = told
    assert only.graph.static == [] or all(isinstance(i, int) for i in only.graph.static)


def test_a_tensor_may_be_made_static(told: list[Told]) -> None:
    def written(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache.add_(x)
        return cache * 2

    cache = torch.zeros(3)
    torch._dynamo.mark_static_address(cache)
    torch.compile(written, backend="tilewright", mode="reduce-overhead")(torch.ones(3), cache)
    (only,) = told
    assert only.addresses == [[cache.data_ptr()]]
    assert written_inputs(only.graph.module) == set(only.graph.static)
