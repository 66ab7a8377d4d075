"""Rewrites run one after another: taken back if they fail, left out by name, verified."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tests.passes.graphs import aten
from tilewright import backend
from tilewright.compile.capture import capture
from tilewright.compile.planner import Planner
from tilewright.compile.stages import STAGES, rewrite
from tilewright.graph.snapshot import Snapshot
from tilewright.hardware.target import target_named
from tilewright.passes.norm.split import widen_moments
from tilewright.passes.stage import Pass, Stage, attempt
from tilewright.passes.verify import VerificationFailed, verify
from tilewright.records.case import Case, InputSpec
from tilewright.records.errors import TilewrightError
from tilewright.verbs.explanation import rewrite_lines, rewrites_of_case

CPU = target_named("cpu")
aten_ops: Any = torch.ops.aten


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWRIGHT_STRICT")


def graph_of_two() -> fx.Graph:
    return aten(lambda x, w: torch.relu(x @ w).sum(), torch.randn(3, 4), torch.randn(4, 5))


def spoiled(graph: fx.Graph, _: object) -> None:
    node = graph.find_nodes(op="call_function", target=aten_ops.relu.default)[0]
    node.target, node.meta["val"] = aten_ops.sin.default, None
    for other in graph.nodes:
        other.args = ()
    graph.create_node("placeholder", "late")
    raise ValueError("halfway\nthrough")


def test_what_a_failed_rewrite_did_is_taken_back(lenient: None, capsys: pytest.CaptureFixture[str]) -> None:
    graph = graph_of_two()
    before, metas = str(graph), [dict(node.meta) for node in graph.nodes]
    (decision,) = attempt(Pass("spoiled", spoiled), graph, CPU)
    graph.lint()
    assert str(graph) == before and [node.meta for node in graph.nodes] == metas
    assert [node.name for node in graph.nodes if node.op == "call_function"] == ["mm", "relu", "sum_1"]
    assert (decision.verdict, decision.producer, decision.consumer) == ("impossible", "mm", "relu")
    assert decision.passed_by == "spoiled"
    line = capsys.readouterr().err
    assert line.startswith("tilewright: the rewrite spoiled is left out at ") and line.endswith("; please report it\n")
    assert "it failed with ValueError: halfway (test_stages.py:" in line and line.count("\n") == 1


def test_strict_makes_a_failed_rewrite_an_error() -> None:
    with pytest.raises(TilewrightError, match=r"the rewrite spoiled is left out at .*relu.*: it failed"):
        attempt(Pass("spoiled", spoiled), graph_of_two(), CPU)


def test_the_others_run_and_those_that_are_named_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def noted(name: str) -> Pass:
        return Pass(name, lambda graph, _: ran.append(name), hand_written=name == "kernel")

    stage = Stage("of three", "", "", tuple(map(noted, ("one", "two", "kernel"))))
    monkeypatch.setenv("TILEWRIGHT_SKIP", "two")
    stage.run(graph_of_two(), CPU)
    stage.run(graph_of_two(), CPU, hand_written=False)
    assert ran == ["one", "kernel", "one"]


def test_a_required_rewrite_is_not_left_out(lenient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of_two()
    monkeypatch.setenv("TILEWRIGHT_SKIP", "spoiled")
    with pytest.raises(ValueError, match="halfway"):
        Stage("of one", "", "", (Pass("spoiled", spoiled, required=True),)).run(graph, CPU)


def test_each_rewrite_has_its_name() -> None:
    names = [one.name for stage in STAGES for one in stage.passes]
    assert len(names) == len(set(names)) and all(rewrite(name).name == name for name in names)


def test_the_document_says_what_holds_before_and_after_each_stage() -> None:
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text("utf-8")
    assert all(f"| {stage.name} | {stage.before} | {stage.after} |" in text for stage in STAGES)


def test_what_each_rewrite_did_is_listed() -> None:
    case = Case("twice", lambda: lambda x: torch.exp(x) + torch.exp(x), InputSpec.parse_many("fp32[3]"), training=False)
    lines = rewrite_lines(rewrites_of_case(case, "cpu"))
    (at,) = [place for place, line in enumerate(lines) if line.startswith("simplify  5 → 4 nodes, ")]
    assert lines[at + 1 : -1] == [
        "  - add = add.Tensor(exp, exp_1)", "  - exp_1 = exp.default(x)", "  + add = add.Tensor(exp, exp)"
    ]  # fmt: skip
    assert lines[-1].endswith("found nothing to change")


def with_meta(node: fx.Node, value: Any) -> None:
    node.meta["val"] = value


SPOILED: dict[str, Callable[[fx.Node], object]] = {
    "dtype": lambda node: with_meta(node, node.meta["val"].double()),
    "shape": lambda node: with_meta(node, node.meta["val"][:2]),
    "strides": lambda node: with_meta(
        node.all_input_nodes[0], node.all_input_nodes[0].meta["val"].t().contiguous().t()
    ),
    "operand": lambda node: setattr(node, "args", (node.all_input_nodes[0].all_input_nodes[0],)),
    "operator": lambda node: setattr(node, "target", aten_ops.isnan.default),
    "order": lambda node: node.append(node.all_input_nodes[0]),
}


def test_a_result_with_memory_that_no_view_declares_is_found() -> None:
    lib = torch.library.Library("aliasing", "FRAGMENT")
    lib.define("itself(Tensor x) -> Tensor")
    lib.impl("itself", lambda x: x[:], "CompositeExplicitAutograd")
    graph = graph_of_two()
    before = Snapshot(graph)
    (node,) = graph.find_nodes(op="call_function", target=aten_ops.relu.default)
    node.target = torch.ops.aliasing.itself.default
    with pytest.raises(VerificationFailed, match="has memory of an operand"):
        verify(graph, before)


def test_moments_that_only_a_gpu_computes_in_fp32_are_no_fault() -> None:
    x, w = torch.randn(4, 3, 5).bfloat16(), torch.ones(3).bfloat16()
    norm = aten_ops._native_batch_norm_legit_functional.default
    graph = aten(lambda x, w: norm(x, w, w, w * 0, w, True, 0.1, 1e-5)[:3], x, w)
    before = Snapshot(graph)
    widen_moments(graph, target_named("h200"))
    (node,) = graph.find_nodes(op="call_function", target=norm)
    assert [value.dtype for value in node.meta["val"][1:3]] == [torch.float32] * 2
    verify(graph, before)


@pytest.mark.parametrize("fault", SPOILED)
def test_the_verifier_finds(fault: str) -> None:
    graph = graph_of_two()
    before = Snapshot(graph)
    verify(graph, before)
    (node,) = graph.find_nodes(op="call_function", target=aten_ops.relu.default)
    with node.meta["val"].fake_mode:
        SPOILED[fault](node)
    with pytest.raises((VerificationFailed, RuntimeError)):
        verify(graph, before)


class SplitHeads(nn.Module):
    """Attention whose heads become batch entries by a view of a contiguous tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, 2, 8).transpose(1, 2).contiguous().view(batch * 2, -1, 8)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        return (torch.bmm(q, k.transpose(1, 2)) * 0.25).softmax(-1) @ v


def blur(x: Tensor) -> Tensor:
    return F.conv2d(x, torch.ones(x.shape[1], 1, 3, 3) / 9, padding=1, groups=x.shape[1])


@pytest.mark.parametrize(
    ("program", "inputs", "dynamic"),
    [
        (SplitHeads(), (torch.randn(2, 4, 16),), False),
        (blur, (torch.randn(2, 4, 8, 8),), True),
        (lambda a, b: (a * b).sum(0), (torch.tensor(2.0), torch.tensor(3.0)), False),
    ],
    ids=["heads by view", "a symbolic number of groups", "a sum without dimensions"],
)
def test_these_do_not_fail(program: Any, inputs: tuple[Tensor, ...], dynamic: bool) -> None:
    inputs = tuple(x.requires_grad_() for x in inputs)
    with backend.recording() as record:
        result = torch.compile(program, backend="tilewright", dynamic=dynamic)(*inputs)
        gradients = torch.autograd.grad(result.sum(), inputs)
    expected = program(*inputs)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), inputs))
    assert record.graphs and not record.fallbacks


WITHOUT_DIMENSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "amax": lambda x: x.amax(-1),
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(0),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(0)[0],
    "scatter_add": lambda x: x.scatter_add(0, torch.zeros((), dtype=torch.long), x),
    "index_add": lambda x: x.index_add(0, torch.zeros(1, dtype=torch.long), x),
    "var": lambda x: x.var(0, correction=0),
}


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_no_rewrite_fails_at_a_tensor_without_dimensions(device: str) -> None:
    def program(x: Tensor) -> list[Tensor]:
        return [function(x * n) for n, function in enumerate(WITHOUT_DIMENSIONS.values(), 1)]

    case = Case("scalars", lambda: program, InputSpec.parse_many("fp32[]"), training=True)
    assert capture(case, Planner(target_named(device))).plan is not None
