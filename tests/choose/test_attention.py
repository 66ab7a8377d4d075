"""Whose kernels an attention runs on: what is refused and why."""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tests.passes.graphs import aten, calls, planned, run
from tilewright.bench.suites.attention import extent
from tilewright.choose.attention import _masking, choose_kernels
from tilewright.choose.generated import work_of
from tilewright.cost.work import Work, predicted_us
from tilewright.graph.calls import launched, nbytes
from tilewright.graph.constants import Constants
from tilewright.hardware.target import target_named
from tilewright.measure.racing.results import read_results
from tilewright.passes.attention.fused import FusedAttention
from tilewright.passes.attention.library import CUDNN, FLASH, ON_CPU, OWN, PEERS, Peer, name_attention
from tilewright.passes.attention.mask_parts import Band
from tilewright.passes.attention.written_out import WRITTEN_OUT
from tilewright.records.errors import Refusal

CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
SHAPES = ((2, 3, 7, 16),) * 3


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_on_a_cpu_pytorch_computes_it_and_the_graph_stays() -> None:
    graph = aten(attention, *(torch.randn(shape) for shape in SHAPES))
    before = calls(graph)
    (decision,) = choose_kernels(graph, target_named("cpu"))
    assert calls(graph) == before
    assert decision.verdict == "impossible" and "this plan is for a CPU" in decision.reason
    assert decision.consumer == "_scaled_dot_product_flash_attention_for_cpu" and decision.producer == "q_1"


def refusal(function: object, monkeypatch: pytest.MonkeyPatch, *inputs: Tensor) -> str:
    """Why a graph as for a GPU keeps PyTorch's kernel."""
    monkeypatch.setenv("TILEWRIGHT_TARGET", "triton")
    # Imported first: what it takes from `device` would stay replaced for the tests that follow.
    pytest.importorskip("tilewright.kernels.attention.decode.triton")
    monkeypatch.setattr("tilewright.kernels.device.interpreted", lambda: True)
    graph = aten(function, *(inputs or tuple(torch.randn(shape) for shape in SHAPES)))  # type: ignore[arg-type]
    before = calls(graph)
    (decision,) = choose_kernels(graph, target_named("cpu"))
    assert decision.verdict == "refused" and calls(graph) == before
    run(graph, *(inputs or tuple(torch.randn(shape) for shape in SHAPES)))
    return decision.reason


def test_what_reads_the_statistics_keeps_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = refusal(lambda q, k, v: CPU(q, k, v)[1].exp(), monkeypatch)
    who = "tilewright.attention does not replace PyTorch's attention for CPUs"
    assert reason == f"{who}: exp reads result 1 of PyTorch's own kernel"
    reason = refusal(lambda q, k, v: CPU(q, k, v), monkeypatch)
    assert "the caller reads result 1" in reason


def through_cudnn(mask: Callable[[Tensor, Tensor], Tensor], fill: float) -> Callable[..., Tensor]:
    """A call of cuDNN's kernel under a bool mask of places, as PyTorch adds it."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = mask(torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])).expand(2, 1, -1, -1)
        added = torch.where(seen, 0.0, torch.scalar_tensor(fill, dtype=q.dtype))
        out: Tensor = CUDNN.forward(q, k, v, added, False)[0]
        return out

    return function


@pytest.mark.parametrize("fill", [-torch.inf, -65504.0])
def test_the_number_that_hides_a_key_from_cudnn_is_read_as_a_band(fill: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # Imported first, as in `refusal`.
    pytest.importorskip("tilewright.kernels.attention.decode.triton")
    monkeypatch.setattr("tilewright.kernels.device.interpreted", lambda: True)

    def of(mask: Callable[[Tensor, Tensor], Tensor], peer: Peer = CUDNN) -> FusedAttention:
        inputs = (torch.randn(2, 3, 24, 16, dtype=torch.bfloat16) for _ in range(3))
        graph = aten(through_cudnn(mask, fill), *inputs)
        (node,) = graph.find_nodes(op="call_function", target=CUDNN.forward)
        return FusedAttention(node, replace(peer, backward=CUDNN.backward), Constants(graph), target_named("cpu"))

    window = of(lambda i, j: (j <= i) & (j > i - 5))
    assert window.band == Band(4, 0) and window.masks == ()
    # Where some query sees no key, only -inf gives zeros; and the other kernels are not given that number by PyTorch.
    for found in (of(lambda i, j: j < i), of(lambda i, j: j <= i, PEERS[0])):
        assert (found.masks == ()) == (fill == -torch.inf)


@pytest.mark.parametrize("heads", [(3, 2, 2), (4, 4, 2)], ids=str)
def test_heads_that_do_not_divide_and_values_of_fewer_heads_than_keys_are_refused(heads: tuple[int, ...]) -> None:
    graph = aten(lambda q, k, v: CPU(q, k, v)[0], *(torch.randn(2, count, 7, 16) for count in heads))
    (node,) = graph.find_nodes(op="call_function", target=CPU)
    with pytest.raises(Refusal, match="operands that broadcast"):
        FusedAttention(node, ON_CPU, Constants(graph), target_named("h200"))


def test_a_mask_that_is_computed_for_one_attention_is_saved_with_it() -> None:
    def of(function: Callable[..., Tensor], *inputs: Tensor) -> list[Work]:
        graph = aten(function, *inputs)
        node, *_ = graph.find_nodes(op="call_function", target=CPU)
        found = FusedAttention(node, ON_CPU, Constants(graph), target_named("h200"))
        return list(_masking(found))

    def window(n: int) -> Tensor:
        away = torch.arange(n)[:, None] - torch.arange(n)
        return (away >= 0) & (away < 5)

    def once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, window(24))

    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.zeros(24, 24).masked_fill(~window(24), -torch.inf)
        return F.scaled_dot_product_attention(F.scaled_dot_product_attention(q, k, v, mask), k, v, mask)

    q, k, v = (torch.randn(2, 3, 24, 16) for _ in range(3))
    (saved,) = of(once, q, k, v)
    assert saved.bytes_written == 24 * 24 * 4
    given = torch.rand(2, 1, 24, 24) > 0.2
    (converted,) = of(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), q, k, v, given)
    assert (converted.bytes_read, converted.bytes_written) == (given.numel(), 4 * given.numel())
    added = of(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), q, k, v, q @ q.mT)
    assert of(twice, q, k, v) == [] == added


@pytest.mark.parametrize(
    ("function", "inputs", "reason"),
    [
        (lambda q, k, v: CPU(q, k, v)[0], [torch.randn(2, 3, 7, 300)] * 3, "head sizes above 256"),
        (lambda q, k, v: CPU(q, k, v)[0], [torch.randn(2, 3, 7, 16).double()] * 3, "float64"),
        (
            lambda q, k, v: CPU(q, k.expand(2, 3, 7, 16), v)[0],
            [torch.randn(2, 3, 7, 16), torch.randn(2, 1, 7, 16), torch.randn(2, 3, 7, 16)],
            "an expanded operand",
        ),
    ],
    ids=["wide heads", "float64", "expanded"],
)
def test_what_the_kernels_do_not_take(
    function: object, inputs: list[Tensor], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reason in refusal(function, monkeypatch, *inputs)


@pytest.mark.parametrize(
    ("heads", "kernel"),
    [
        ((24, 4), "tilewright.attention with the backward of cuDNN"),
        ((24, 24), "tilewright.attention (Gluon, for Hopper; backward CUDA C++, for Hopper)"),
    ],
)
def test_few_key_heads_leave_the_backward_to_pytorch_in_a_plan(heads: tuple[int, int], kernel: str) -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    plan = planned(grouped, ",".join(f"bf16[2,{count},2222,96]" for count in (heads[0], *heads[1:] * 2)))
    reasons = [d.reason for d in plan.decisions if d.passed_by == "attention"]
    assert [reason.partition(":")[0] for reason in reasons] == [f"{kernel} in place of cuDNN"]
    shares = heads[0] != heads[1]
    backward = "aten._scaled_dot_product_cudnn_attention_backward" if shares else "tilewright.attention_backward"
    launched = [what for _, _, what in plan.launches() if "attention" in what]
    assert launched == ["tilewright.attention.default", f"{backward}.default"]


def test_heads_wider_than_the_kernels_stay_with_pytorch() -> None:
    plan = planned(F.scaled_dot_product_attention, ",".join(["bf16[2,1,8192,264]"] * 3))
    (decision,) = (d for d in plan.decisions if d.passed_by == "attention")
    assert decision.verdict == "refused" and "tilewright.attention does not replace" in decision.reason


ROOT = Path(__file__).parents[2]
NAMES = {"tilewright.attention": "tilewright", "cudnn": "cudnn", "flash": "flash2"}
Times = dict[str, float]
"""Microseconds by implementation."""


class Step(NamedTuple):
    """A training step that was measured on an H200."""

    batch: int
    heads: int
    groups: int
    length: int
    width: int
    is_causal: bool
    times: tuple[Times, Times]
    """Forward and backward."""

    @property
    def graph(self) -> fx.Graph:
        def step(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
            out, lse = ON_CPU.forward(q, k, v, 0.0, self.is_causal)
            return out, *ON_CPU.backward(dout, q, k, v, out, lse, 0.0, self.is_causal)

        q, k, v, dout = (
            torch.empty(self.batch, heads, self.length, self.width, dtype=torch.bfloat16)
            for heads in (self.heads, self.groups, self.groups, self.heads)
        )
        return aten(step, q, k, v, dout)


def benchmarked() -> list[Step]:
    """As many heads of keys as of queries."""
    rows = read_results(ROOT / "benchmarks/results/h200/attention.jsonl")
    found: dict[str, dict[str, Times]] = defaultdict(lambda: {"fwd": {}, "bwd": {}, "fwd+bwd": {}})
    for row in rows:
        found[row.case][row.direction][row.impl] = row.median_us
    steps = []
    for case, times in found.items():
        matched = re.fullmatch(r"d(\d+) S(\d+) (causal|full)", case)
        if matched:
            size = extent((int(matched[1]), int(matched[2]), int(matched[3] == "causal")))
            whole = size.batch, size.heads, size.heads, size.length, size.width, size.causal
            steps.append(Step(*whole, (times["fwd"], times["bwd"])))
    return steps


def documented() -> list[Step]:
    """Few heads of keys: the table of docs/kernels.md."""
    row = re.compile(r"\| (\d+) × (\d+)(?: on (\d+))?, (\d+), (\d+)(, not causal)? \|(.*)\|")
    steps = []
    for matched in row.finditer((ROOT / "docs/kernels.md").read_text()):
        batch, heads, groups, length, width = (int(matched[place] or matched[2]) for place in range(1, 6))
        figures = [[float(us) for us in cell.split("/")] for cell in matched[7].split("|")[:3]]
        forward, backward = (dict(zip(NAMES.values(), one, strict=True)) for one in zip(*figures, strict=True))
        steps.append(Step(batch, heads, groups, length, width, not matched[6], (forward, backward)))
    return steps


@pytest.mark.parametrize(("steps", "count"), [(benchmarked, 36), (documented, 4)])
def test_the_pair_that_is_planned_is_the_fastest_that_was_measured(steps: Callable[[], list[Step]], count: int) -> None:
    found = steps()
    assert len(found) == count
    for step in found:
        graph = step.graph
        for rewrite in (choose_kernels, name_attention):
            rewrite(graph, target_named("h200"))
        operators = [str(launched(node)) for node in graph.nodes if "attention" in str(node.target)]
        chosen = [next(NAMES[name] for name in NAMES if name in operator) for operator in operators]
        us = sum(times[impl] for impl, times in zip(chosen, step.times, strict=True))
        assert us <= 1.02 * sum(min(times[impl] for impl in NAMES.values()) for times in step.times), (step, chosen)


@pytest.mark.parametrize("backward", [OWN, CUDNN, FLASH], ids=lambda peer: peer.name)
@pytest.mark.parametrize("forward", [OWN, CUDNN, FLASH], ids=lambda peer: peer.name)
def test_any_forward_goes_with_any_backward(forward: Peer, backward: Peer) -> None:
    """In 16 bits: the graph gives results of the same shapes, and has no other attention."""
    graph = documented()[0].graph
    (node,) = graph.find_nodes(op="call_function", target=ON_CPU.forward)
    before = [value.meta["val"].shape for value in graph.output_node().args[0]]
    FusedAttention(node, ON_CPU, Constants(graph), target_named("h200")).rewrite(forward, backward)
    graph.lint()
    assert [value.meta["val"].shape for value in graph.output_node().args[0]] == before
    found = [node.target for node in graph.nodes if "attention" in str(node.target)]
    assert found == [forward.forward, backward.backward]


def test_flash_attention_2_is_predicted_as_it_was_measured() -> None:
    errors = []
    for step in benchmarked():
        nodes = [node for node in step.graph.nodes if "flash_attention" in str(node.target)]
        for node, times in zip(nodes, step.times, strict=True):
            work = work_of([node])
            assert work.kind == f"attention{' backward' * ('backward' in str(node.target))}, flash"
            errors.append(abs(predicted_us(work, target_named("h200").profile) / times["flash2"] - 1))
    assert median(errors) < 0.06


@pytest.mark.parametrize(
    ("batch", "options", "taken"),
    [
        (1024, {}, True),
        (1024, {"scale": 0.7}, True),
        (1024, {"is_causal": True}, False),
        (1024, {"dropout_p": 0.5}, False),
        (64, {}, False),
    ],
    ids=str,
)
def test_many_short_sequences_run_in_the_kernel_for_windows(batch: int, options: dict[str, Any], taken: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)

    plan = planned(attend, ",".join([f"bf16[{batch},4,48,32]"] * 3))
    windows = [f"tilewright.window_attention{way}.default" for way in ("", "_backward")]
    assert [what for _, _, what in plan.launches() if "window" in what] == windows * taken


def test_every_fused_attention_of_pytorch_is_known_with_its_backward() -> None:
    for peer in PEERS:
        forward, backward = (str(target).removesuffix(".default") for target in (peer.forward, peer.backward))
        assert backward == f"{forward}_backward"
        assert {"query", "key", "value", "dropout_p", "is_causal", "scale"} <= {
            argument.name for argument in peer.forward._schema.arguments
        }
        assert {"query", "key", "value", "out"} <= {argument.name for argument in peer.backward._schema.arguments}


@pytest.mark.parametrize("hides", ["nothing", "causal", "bool mask", "bias"])
@pytest.mark.parametrize("lies", ["heads apart", "heads beside", "one sequence"])
def test_written_out_it_is_the_formula(lies: str, hides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, queries, keys = (1 if lies == "one sequence" else 2), 37, 37 if hides == "causal" else 29
    # Query 5 sees no key.
    seen = (torch.rand(1, 3, queries, keys) > 0.3) & (torch.arange(queries) != 5)[:, None]
    bias = torch.randn(batch, 1, queries, keys).masked_fill(~seen[:, :1], -torch.inf)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if lies != "heads apart":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        given = mask if hides in ("bool mask", "bias") else None
        return F.scaled_dot_product_attention(q, k, v, given, is_causal=hides == "causal", scale=0.7)

    sizes = [(queries, 24), (keys, 24), (keys, 24)]
    shapes = [(batch, 3, n, d) if lies == "heads apart" else (batch, n, 3, d) for n, d in sizes]
    # Scores of some hundreds: a softmax without its maximum would overflow.
    inputs = [torch.randn(shape) * scale for shape, scale in zip(shapes, (9, 9, 1), strict=True)]
    inputs.append(seen if hides == "bool mask" else bias)
    graph = aten(attend, *inputs)
    (node,) = graph.find_nodes(op="call_function", target=CPU)
    # As on a GPU that is here, where results keep the strides of PyTorch's.
    monkeypatch.setattr("tilewright.kernels.device.interpreted", lambda: True)
    found = FusedAttention(node, ON_CPU, Constants(graph), target_named("cpu"))
    assert found.writes_scores
    found.rewrite(WRITTEN_OUT)
    assert not [call for call in calls(graph) if "attention" in call]
    steps = {"mul.Tensor", "masked_fill.Scalar", "add.Tensor"}
    made = [nbytes(node) for node in graph.nodes if str(node.target).removeprefix("aten.") in steps]
    assert [work.bytes_written for work in WRITTEN_OUT.apart(found.request, hides=hides != "nothing")] == made
    copies = [node for node in graph.nodes if node.target is torch.ops.aten.clone.default]
    of_operands = [nbytes(node) for node in copies if "view" in str(next(iter(node.users)).target)]
    # The first is of the scores, whose rows do not begin at multiples of 16 bytes.
    _, *priced = (work.bytes_read for work in WRITTEN_OUT.works(found.request, 0) if work.kind == "pointwise")
    assert priced == of_operands and len(priced) == (3 if lies == "heads beside" else 0)
    truth = attend(*(x if x.dtype == torch.bool else x.double() for x in inputs))
    outs = run(graph, *inputs), attend(*inputs)
    assert outs[0].stride() == outs[1].stride()
    ours, eager = ((out - truth).abs().max() for out in outs)
    assert ours <= 2 * eager + 4 * torch.finfo(torch.float32).eps * truth.abs().max()


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / 8.0, -1) @ v


def under_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = v[:1, :1, :, :1] > k[:1, :1, :, 0]
    return torch.softmax((q @ k.mT / 8.0).masked_fill(hidden, -torch.inf), -1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    ("function", "shape", "is_written"),
    [
        (fused, "f32[B=32,H=8,S=512,D=128]", True),
        (fused, "f32[B=32,H=8,S=512,D=1024]", True),
        # Scores of twice the bytes of q, k, v and the result, which the program writes only in its own form.
        (fused, "f32[B=32,H=8,S=512,D=64]", False),
        (written, "f32[B=32,H=8,S=512,D=64]", True),
        (written, "f32[B=8,H=8,S=2048,D=64]", False),
        (under_a_mask, "f32[B=32,H=8,S=512,D=64]", True),
        (fused, "bf16[B=32,H=8,S=512,D=128]", False),
    ],
)
def test_attention_of_fp32_is_written_out_where_its_products_win(
    function: Callable[..., Tensor], shape: str, is_written: bool
) -> None:
    dtype = shape.partition("[")[0]
    for training in (False, True):
        plan = planned(function, f"{shape}, {dtype}[B,H,S,D], {dtype}[B,H,S,D]", training)
        products = [what for _, _, what in plan.launches() if what.startswith("tilewright.product")]
        assert len(products) == (2 if is_written and not training else 0)


def test_copies_of_what_its_products_cannot_read_are_priced() -> None:
    def predicted(shape: str) -> float:
        plan = planned(fused, f"{shape}, f32[B,H,S,D], f32[B,H,S,D]", training=False)
        (decision,) = (d for d in plan.decisions if d.passed_by == "attention")
        return decision.predicted_us or 0

    # Rows of 127 and 128 numbers: q, k and v are copied to where rows begin at multiples of 16 bytes.
    assert predicted("f32[B=32,H=8,S=500,D=127]") > 1.1 * predicted("f32[B=32,H=8,S=500,D=128]")
