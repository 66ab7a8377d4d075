"""Programs of which equal iterations are left out, priced as the same programs captured whole."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from examples import online_softmax
from tilewright.capture import call_cycles
from tilewright.capture.recurrent_steps import write_out_steps
from tilewright.compile.price import price_case, price_program
from tilewright.hardware.profiles import profile_for
from tilewright.hardware.target import absent
from tilewright.passes import fusion
from tilewright.pytorch.state import without_onednn
from tilewright.records.case import Case, InputSpec
from tilewright.records.program import GraphName, Operator, Program, Stage

H200 = absent(profile_for("h200"))


@pytest.fixture(autouse=True)
def long_from_forty_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cycles, "FEWEST_CALLS", 40)
    monkeypatch.setattr(call_cycles, "KEPT_CALLS", 24)
    monkeypatch.setattr(call_cycles, "FEWEST_KEPT", 3)
    monkeypatch.setattr(fusion, "MOST_BUFFERS", 8)


def case(model: Callable[..., Any], inputs: str, *, training: bool = False) -> Case:
    return Case("case", lambda: model, [InputSpec.parse(one) for one in inputs.split()], training=training)


def launches(program: Program, graph: GraphName, stage: Stage) -> list[Operator]:
    rows = [op for op in program.operators if (op.graph, op.stage) == (graph, stage)]
    return [op for op in rows if op.operator_class != "layout"]


def assert_alike(
    found: Program, whole: Program, graph: GraphName, stages: tuple[Stage, ...] = ("before", "after")
) -> None:
    for stage in stages:
        counted, every = launches(found, graph, stage), launches(whole, graph, stage)
        assert [(op.target, op.shape, op.cost) for op in counted] == [(op.target, op.shape, op.cost) for op in every]
        assert len({op.name for op in counted}) == len(counted)
        names = {op.name for op in found.operators if op.stage == stage}
        assert {read for op in counted for read in op.inputs} <= names | inputs(whole, stage)
        assert found.peak_bytes(graph, stage) == whole.peak_bytes(graph, stage)


def inputs(program: Program, stage: Stage) -> set[str]:
    """What its operators read and none of them makes."""
    operators = [op for op in program.operators if op.stage == stage]
    return {read for op in operators for read in op.inputs} - {op.name for op in operators}


def verdicts(program: Program) -> Counter[tuple[str, str]]:
    return Counter((decision.verdict, decision.reason) for decision in program.decisions)


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return x


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_layers_with_weights_of_their_own(training: bool) -> None:
    asked = case(Layers(), "fp32[4,8]", training=training)
    found, whole = price_program(asked, H200), price_case(asked, H200).program
    assert "of which 23 iterations of 3 each" in found.folded and not whole.folded
    assert_alike(found, whole, "forward")
    if training:
        assert_alike(found, whole, "backward", ("before",))
        # What is computed again is one kernel for eleven layers: those left out are counted in whole kernels.
        counted, every = (launches(each, "backward", "after") for each in (found, whole))
        assert 0 <= len(counted) - len(every) <= 1
    else:
        assert verdicts(found) == verdicts(whole)


def norms(x: torch.Tensor, gain: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    for _ in range(12):
        x = (gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))) @ w
    return x


def test_rewrites_before_autograd_see_the_short_program() -> None:
    asked = case(norms, "fp32[4,64] fp32[64] fp32[64,64]")
    found, whole = price_program(asked, H200), price_case(asked, H200).program
    assert found.folded and any(decision.passed_by == "rms_norm" for decision in found.decisions)
    assert_alike(found, whole, "forward")


def recurrence(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    state, states = torch.zeros_like(x[:, 0]), []
    for step in x.unbind(1):
        state = torch.tanh(step @ w + state @ u)
        states.append(state)
    return torch.stack(states, 1)


def test_values_of_iterations_left_out_are_read_behind_the_loop() -> None:
    asked = case(recurrence, "fp32[3,28,8] fp32[8,8] fp32[8,8]")
    found, whole = price_program(asked, H200), price_case(asked, H200).program
    assert "27 iterations of 4 each" in found.folded
    (stacked,) = (op for op in launches(found, "forward", "before") if "cat" in op.target or "stack" in op.target)
    (expected,) = (op for op in launches(whole, "forward", "before") if "cat" in op.target or "stack" in op.target)
    assert stacked.cost == expected.cost
    counted = [op.target for op in launches(found, "forward", "before")]
    assert counted == [op.target for op in launches(whole, "forward", "before")]


def test_a_kernel_of_many_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cycles, "KEPT_CALLS", 90)
    # Three columns make a kernel; 24 are left out.
    asked = online_softmax.case(N=4, M=39)
    found, whole = price_program(asked, H200), price_case(asked, H200).program
    assert found.folded
    assert_alike(found, whole, "forward")


def test_a_program_without_a_cycle_is_captured_whole() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        for i in range(2, 24):
            x = torch.nn.functional.pad(x, (0, 1)) * i
        return x

    assert not price_program(replace(case(model, "fp32[4,8]")), H200).folded


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(4, 8, bidirectional=True, batch_first=True)
        self.gru, self.rnn = torch.nn.GRU(16, 4), torch.nn.RNN(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, (_, cells) = self.lstm(x)
        y, hidden = self.rnn(self.gru(y)[0])
        return y.sum() + hidden.sum() + cells[0].sum()


class BothWays(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(4, 8, bidirectional=True, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, (_, cells) = self.lstm(x)
        return y.sum() + cells[0].sum()


@torch._dynamo.config.patch(allow_rnn=True)
def test_each_loop_of_recurrent_layers_is_shortened() -> None:
    asked = case(BothWays(), "fp32[3,18,4]")
    found, whole = price_program(asked, H200), price_case(asked, H200).program
    assert found.folded.count("17 iterations") == 2 and not whole.folded
    counted = Counter((op.target, op.shape) for op in launches(found, "forward", "before"))
    assert counted == Counter((op.target, op.shape) for op in launches(whole, "forward", "before"))
    assert not found.memory and whole.memory


@torch._dynamo.config.patch(allow_rnn=True)
def test_written_out_layers_compute_what_they_did() -> None:
    model, x, written = Recurrent(), torch.randn(3, 5, 4), []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        write_out_steps(module)
        written.append(module.graph)
        return module.forward

    with without_onednn():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    targets = [node.target for node in written[0].nodes]
    assert targets.count("sigmoid") == 3 * 4 * 2 + 2 * 3 * 2 and not {torch.lstm, torch.gru, torch.rnn_tanh} & {
        *targets
    }
