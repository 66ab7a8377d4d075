"""A case priced for a target: all of it captured, nothing run, every kind of model and every refusal."""

import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import attention, gelu_dropout_residual, naive_softmax, transformer_block
from tests.passes.graphs import neighbours
from tilewright import functional
from tilewright.compile.capture import capture
from tilewright.compile.price import PricedCase, price_case
from tilewright.hardware.profiles import DeviceProfile, profile_for
from tilewright.hardware.target import absent, target_named
from tilewright.records.case import Case, InputSpec
from tilewright.records.errors import CaptureError, InputError
from tilewright.records.program import Operator

CPU = target_named("cpu")


def case(model: Callable[..., Any], inputs: str, training: bool = False) -> Case:
    return Case("subject", lambda: model, InputSpec.parse_many(inputs), training=training)


def priced(model: Callable[..., Any], inputs: str, training: bool = False) -> PricedCase:
    return price_case(case(model, inputs, training), CPU)


def operators(found: PricedCase, stage: str = "before", graph: str = "forward") -> list[Operator]:
    return [op for op in found.program.operators if (op.stage, op.graph) == (stage, graph)]


def targets(found: PricedCase, stage: str = "before", graph: str = "forward") -> list[str]:
    return [op.target.removeprefix("aten.").partition(".")[0] for op in operators(found, stage, graph)]


class Normed(nn.Module):
    """Parameters, buffers that a training step updates, and a draw."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.dropout(self.norm(x))
        return result.relu()


# Every kind of model.


def test_a_model_in_training_draws_and_in_evaluation_does_not() -> None:
    assert "native_dropout" in targets(priced(Normed().train(), "fp32[N=4,8]", training=True))
    found = priced(Normed().eval(), "fp32[N=4,8]", training=True)
    assert not {"native_dropout", "bernoulli"} & {*targets(found), *targets(found, "after")}


def writes_its_input(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


OPERATORS: dict[str, tuple[Callable[..., Any], str, bool, list[str]]] = {
    "results of a dict": (
        lambda x: {"a": x.sin(), "b": [x.cos(), 3], "c": "text", "d": None},
        *("fp32[N=4]", False, ["sin", "cos"]),
    ),
    "integers, which have no backward": (lambda i: (i * 2).sum(), "i64[N=4,M=6]", True, ["mul", "sum"]),
    "a write to an input": (writes_its_input, "fp32[N=4]", False, ["add", "mul", "copy_"]),
    "indices beside floats": (lambda x, i: x[i].exp(), *("fp32[N=9,M=8],i64[K=3]", True, ["index", "exp"])),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_of_a_model(name: str) -> None:
    model, inputs, training, expected = OPERATORS[name]
    found = priced(model, inputs, training)
    assert [target for target in targets(found) if target != "detach"] == expected
    assert bool(operators(found, graph="backward")) == (training and "fp32" in inputs)
    assert {op.cost.provenance for op in found.program.operators} == {"formula"}


def test_explaining_leaves_a_models_buffers_as_they_are() -> None:
    model = Normed().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    priced(model, "fp32[N=4,8]", training=True)
    priced(model, "fp32[N=4,8]")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_nothing_is_computed() -> None:
    # A step of this would take minutes and 100 GB.
    found = priced(lambda x: (x @ x.t()).sum(), "fp32[N=100000,D=512]")
    assert [op.cost.flops for op in operators(found) if op.operator_class == "compute"] == [2 * 100000**2 * 512]


def test_a_generator_of_results_that_nobody_can_know_is_named() -> None:
    found = priced(lambda x: torch.fft.fft(x).abs(), "fp32[N=8]")
    unknown = [op for op in operators(found) if op.cost.provenance == "unknown"]
    assert unknown and all(op.floor_us is None and op.bound is None for op in unknown)


def test_capturing_many_cases_is_no_recompilation() -> None:
    # Past 8 variants of one function, Dynamo would run it as it is.
    for width in range(1, 13):
        assert len(operators(priced(lambda x: x.exp(), f"fp32[N={width}]"))) == 1


# Every record.


@pytest.fixture(scope="module")
def block() -> PricedCase:
    return price_case(transformer_block.case(D=32, H=4, B=2, S=16), CPU)


def test_every_record_of_the_block_is_whole(block: PricedCase) -> None:
    for op in block.program.operators:
        assert op.cost.provenance == "formula", op
        assert (op.floor_us is None) == (op.operator_class == "layout"), op
        assert op.target == "kernel" or op.source is None or op.source.startswith("transformer_block.py:")
        assert op.dtype in ("float32", "bool", "int64")
    names = {
        (op.graph, op.stage): {o.name for o in operators(block, op.stage, op.graph)} for op in block.program.operators
    }
    assert len(names) == 4
    # What a launch reads was made by a launch before it, or is the caller's.
    module = transformer_block.case(D=32, H=4, B=2, S=16).build()
    made = {"x", *(name.replace(".", "_") for name, _ in module.named_parameters())}
    for op in operators(block, "after"):
        assert made.issuperset(op.inputs), op
        made.add(op.name)


def test_every_region_is_one_launch(block: PricedCase) -> None:
    launches = {op.name: op for op in block.program.operators if op.stage == "after"}
    assert block.program.regions
    for region in block.program.regions:
        launch = launches[region.name]
        assert launch.region == region.name and launch.cost == region.cost
        # Regions that compute the same have the kernel of one of them.
        assert any(name in region.source_code for name in launches)
        assert region.predicted_us == launch.predicted_us is not None


def test_the_block_has_a_row_for_every_pair_and_a_price_for_every_kernel(block: PricedCase) -> None:
    rows = {(d.graph, d.producer, d.consumer): d for d in block.program.decisions if d.passed_by == "fusion"}
    pairs = {(graph.name, *pair) for graph in block.plan.graphs for pair in neighbours(graph.graph)}
    assert set(rows) == pairs and len(pairs) > 60
    times = {(region.graph, name): region.predicted_us for region in block.program.regions for name in region.members}
    for row in rows.values():
        if row.verdict == "taken":
            assert row.bytes_saved > 0 and row.predicted_us == times[row.graph, row.consumer]
        else:
            assert row.bytes_saved == 0 and row.predicted_us is None
    attention = [d for d in block.program.decisions if d.passed_by == "attention"]
    assert [d.verdict for d in attention] == ["taken", "impossible"]
    # One puts a fused form where attention was written out, the other says whose kernel computes that.
    kernel = next(op for op in operators(block, "after") if op.name == attention[1].consumer)
    assert attention[0].predicted_us == attention[1].predicted_us == kernel.predicted_us


class Adopted(nn.Module):
    """A block that calls tilewright's own operators."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale, self.bias = (nn.Parameter(torch.ones(32)) for _ in range(3))
        self.project = nn.Linear(32, 96)
        self.up, self.down = (nn.Parameter(torch.randn(shape)) for shape in ((128, 32), (32, 128)))

    def forward(self, x: Tensor) -> Tensor:
        h = functional.layer_norm(x, self.norm, self.bias)
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.project(h).chunk(3, -1))
        mixed = functional.attention(q, k, v, causal=True).transpose(1, 2).flatten(2)
        x = functional.dropout_add(mixed, x, 0.1)
        h = functional.linear_gelu(functional.rms_norm(x, self.scale), self.up)
        return functional.linear_dropout_add(h, self.down, None, x, 0.1)


def test_tilewrights_own_operators_are_priced_like_any_other() -> None:
    adopted = case(Adopted(), "bf16[B=2,S=16,D=32]", training=True)
    # Built in fp32, since a case's inputs alone say their dtype.
    adopted = replace(adopted, build=lambda: Adopted().to(torch.bfloat16))
    found = price_case(adopted, target_named("h200"))
    ours = {op.target: op for op in found.program.operators if op.target.startswith("tilewright.")}
    assert {name.split(".")[1] for name in ours} >= {
        *("norm", "norm_backward", "dropout_add", "dropout_add_backward", "linear_gelu")
    }
    for op in ours.values():
        assert op.cost.provenance == "formula" and op.floor_us and op.bound, op.name
    # The mask is two numbers from which it is drawn again.
    elements = 2 * 16 * 32
    assert ours["tilewright.dropout_add.default"].cost.bytes_written == 2 * elements + 2 * 8
    reasons = {d.reason for d in found.program.decisions}
    own = "tilewright.linear_gelu.default is a hand-written kernel of tilewright's, into which nothing can be fused"
    assert own in reasons
    assert not found.program.fallbacks


def test_a_loss_in_chunks_holds_the_logits_of_one_of_them() -> None:
    """8192 tokens of 131072 words in bf16 are 2.1 GB of logits, of which less than half live at once."""

    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return functional.linear_cross_entropy(x, weight, target)

    found = priced(loss, "bf16[T=8192,D=64],bf16[V=131072,D=64],int64[T=8192]")
    points = [point.live_bytes for point in found.program.memory if point.stage == "before"]
    assert 0 < max(points) < 8192 * 131072 * 2 / 2


def test_fusing_saves_launches_bytes_and_memory_but_computes_the_same(block: PricedCase) -> None:
    for graph in ("forward", "backward"):
        before = [op for op in operators(block, "before", graph) if op.operator_class != "layout"]
        after = [op for op in operators(block, "after", graph) if op.operator_class != "layout"]
        assert len(after) < len(before)
        assert sum(op.cost.bytes for op in after) < sum(op.cost.bytes for op in before)
        peak = {
            stage: max(p.live_bytes for p in block.program.memory if (p.graph, p.stage) == (graph, stage))
            for stage in ("before", "after")
        }
        assert peak["after"] < peak["before"]
    products = {
        stage: sum(op.cost.flops for op in operators(block, stage) if op.operator_class == "compute")
        for stage in ("before", "after")
    }
    assert products["before"] == products["after"]


def test_a_value_named_after_an_operator_is_no_operator() -> None:
    # The backward graph of `max` is handed its indices under the name `getitem_1`.
    found = price_case(replace(naive_softmax.case(N=8, M=16), training=True), CPU)
    assert operators(found, "after", "backward")


@pytest.mark.parametrize("device", ["h200", "b200", "2080ti", "mi250", "cpu"])
def test_floors_are_those_of_the_device(device: str) -> None:
    profile = profile_for(device)
    found = price_case(naive_softmax.case(), absent(profile))
    (launch,) = operators(found, "after")
    # 160 MB: more than any of their caches hold; half is read, half written.
    assert launch.bound == "DRAM-bound" and launch.floor_us is not None
    assert launch.floor_us == pytest.approx(_copy_us(160e6, profile), rel=0.05)


def test_the_plan_is_that_of_the_device_asked() -> None:
    """A CPU's attention needs a kernel beside it that looks for NaN; each draws as PyTorch does on its device."""
    asked = attention.case(B=2, N=64, d=16), replace(gelu_dropout_residual.case(N=256, M=256), training=True)
    on_gpu, on_cpu = ([price_case(case, target_named(device)) for case in asked] for device in ("h200", "cpu"))
    assert "kernel" not in targets(on_gpu[0], "after") and "kernel" in targets(on_cpu[0], "after")
    for found, draws in ((on_gpu[1], "draw.in_groups("), (on_cpu[1], "tw_draw(")):
        assert "keep_mask" not in targets(found, "after")
        assert any(draws in region.source_code for region in found.program.regions)
    for found, language in ((on_gpu[1], "triton"), (on_cpu[1], "c++")):
        assert {region.language for region in found.program.regions} == {language}


NOT_TIMED = "), and no other was timed"


@pytest.mark.parametrize(
    ("dtype", "device", "training", "reason"),
    [
        ("bf16", "h200", False, " for Hopper) in place of cuDNN"),
        ("bf16", "h200", True, " for Hopper) in place of cuDNN"),
        ("fp32", "h200", True, f"the matrix instructions take 16-bit floats, not torch.float32{NOT_TIMED}"),
        ("bf16", "a100", True, f"wgmma instructions, which compute capability 8.0 lacks{NOT_TIMED}"),
        ("bf16", "cpu", False, "does not replace PyTorch's attention for CPUs: its kernels run on GPUs only"),
    ],
)
def test_whose_attention_runs_is_planned_for_the_device_asked(
    dtype: str, device: str, training: bool, reason: str
) -> None:
    pytest.importorskip("triton")
    asked = replace(attention.case(B=2, N=64 * (1 + training), d=64, dtype=dtype), training=training)
    found = price_case(asked, target_named(device))
    *_, decision = [d for d in found.program.decisions if d.passed_by == "attention"]
    ours = (dtype, device) == ("bf16", "h200")
    assert reason in decision.reason and decision.verdict == (
        "taken" if ours else "impossible" if device == "cpu" else "refused"
    )
    assert ("; backward CUDA C++, for Hopper)" in decision.reason) == (ours and training)
    launch = next(op for op in operators(found, "after") if op.name == decision.consumer)
    assert launch.predicted_us == decision.predicted_us and launch.cost.provenance == "formula"
    ran = {op.target for op in found.program.operators if op.stage == "after"}
    own = ["tilewright.attention.default", "tilewright.attention_backward.default"][: 1 + training] if ours else []
    assert {target for target in ran if target.startswith("tilewright.")} == set(own)


@pytest.mark.parametrize("device", ["h200", "a100", "cpu"])
def test_attention_called_by_name_is_one_operator_where_its_kernels_run(device: str) -> None:
    def windowed(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return functional.attention(q, k, v, causal=True, window=(16, 0))

    found = price_case(case(windowed, ", ".join(["bf16[2,4,256,64]"] * 3), training=True), target_named(device))
    kernels = ["tilewright.attention.default", "tilewright.attention_backward.default"]
    for stage in ("before", "after"):
        ran = [op.target for op in found.program.operators if op.stage == stage and op.cost.bytes]
        assert (ran == kernels) == (device != "cpu") and ("aten.bmm.default" in ran) == (device == "cpu")
    # 256 queries of 2 · 4 heads see 17 keys each, the first 16 fewer; two products of 64 multiply-adds each.
    if device != "cpu":
        seen = 2 * 4 * (256 * 17 - 16 * 17 // 2)
        assert found.program.operators[0].cost.flops == seen * 2 * 64 * 2


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "reason"),
    [
        (64, 1, 8192, "many key heads that nothing shares, and no race was run here"),
        (2, 8, 64, "(few queries or keys), and no other was timed"),
    ],
)
def test_an_attention_that_only_a_race_settles_stays(batch: int, queries: int, keys: int, reason: str) -> None:
    pytest.importorskip("triton")
    shapes = ",".join(f"bf16[{batch},4,{length},64]" for length in (queries, keys, keys))
    asked = case(F.scaled_dot_product_attention, shapes, training=keys == 64)
    (decision,) = [d for d in price_case(asked, target_named("h200")).program.decisions if d.passed_by == "attention"]
    assert decision.verdict == "refused" and reason in decision.reason


def test_a_plan_has_no_copies_that_only_a_cpus_kernel_makes_necessary() -> None:
    """PyTorch's kernel for CPUs lays gradients out by sequence; those of GPUs as the operands are."""
    pytest.importorskip("triton")
    asked = case(F.scaled_dot_product_attention, ",".join(["bf16[2,4,256,64]"] * 3), training=True)
    found = price_case(asked, target_named("h200"))
    assert [op.target for op in operators(found, "after", "backward")] == ["tilewright.attention_backward.default"]


def _copy_us(nbytes: float, profile: DeviceProfile) -> float:
    return nbytes / profile.copy_GBps / 1e3


# Every refusal.


def product(x: Tensor, y: Tensor) -> Tensor:
    z = x.relu()
    return z @ y


def refuses(x: Tensor) -> Tensor:
    raise ValueError("only even batches")


def breaks(x: Tensor) -> Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


def branches(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


def selects(x: Tensor) -> Tensor:
    return x[x > 0].sin()


@pytest.mark.parametrize("training", [False, True])
def test_an_operator_that_refuses_its_operands(training: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError) as caught:
        capture(case(product, "fp32[N=4,M=6],fp32[N=4,M=6]", training))
    first, second = str(caught.value).splitlines()
    assert first.startswith("subject does not accept its inputs at test_price.py:")
    assert first.endswith(": return z @ y")
    assert second.startswith("  matmul of [4, 6], [4, 6]: ") and "[4, 6] X [4, 6]" in second
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("training", [False, True])
def test_a_product_of_two_dtypes_is_refused_as_pytorch_refuses_it(training: bool) -> None:
    with pytest.raises(InputError) as caught:
        capture(case(product, "bf16[N=4,M=6],fp32[M=6,K=4]", training))
    first, second = str(caught.value).splitlines()
    assert first.startswith("subject does not accept its inputs at test_price.py:") and "return z @ y" in first
    assert second == "  mm of several dtypes: bfloat16, float32"


NARROW, LSTM = nn.Linear(8, 3), nn.LSTM(8, 3)
LINE = r"at test_price\.py:\d+: "
REFUSED: dict[str, tuple[Callable[..., Any], str, bool, type[Exception], str]] = {
    "a module's input": (
        lambda x: NARROW(x),
        *("fp32[N=4,9]", False, InputError, LINE + r".*NARROW\(x\),\n.*linear of \[4, 9\], \[3, 8\], \[3\]: "),
    ),
    "a leaf that is written to": (
        lambda x: x.add_(1),
        *("fp32[N=4]", True, InputError, r"add_ of \[4\]: a leaf Variable .* --inference"),
    ),
    "an exception of the model's": (
        refuses,
        *("fp32[N=3]", False, InputError, LINE + r"raise ValueError\(.*\)\n  ValueError\('only even ba"),
    ),
    "a graph break": (
        breaks,
        *("fp32[N=4]", False, CaptureError, rf"subject is not one graph; it breaks {LINE}torch\._dynamo\.graph_break"),
    ),
    "a branch on a value": (
        branches,
        *(
            "fp32[N=4]",
            False,
            CaptureError,
            rf"subject is not one graph; it breaks {LINE}if x\.sum\(\) > 0:\n  which branch",
        ),
    ),
    "a recurrent layer": (
        lambda x: LSTM(x)[0],
        *("fp32[N=4,8]", False, CaptureError, r"torch\._dynamo\.config\.allow_rnn = True"),
    ),
    "a size of the data": (
        selects,
        *("fp32[N=4]", False, CaptureError, LINE + r"return x\[x > 0\]\.sin\(\)(.|\n)*([dD]epend|Dynamic shape)"),
    ),
    "no tensors": (
        lambda x: 3,
        *("fp32[N=4]", False, CaptureError, "subject computes no tensor from its inputs; there is nothing to explain"),
    ),
}


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_a_recurrent_layer_calls_a_library_for_cpus_only_on_a_cpu(device: str) -> None:
    with torch._dynamo.config.patch(allow_rnn=True):
        graph = capture(case(lambda x: LSTM(x)[0], "fp32[N=4,8]"), target=absent(profile_for(device))).graphs["forward"]
    named = [node.name for node in graph.nodes]
    assert ("mkldnn_rnn_layer" in named) == (device == "cpu") and ("tanh" in named) == (device != "cpu")
    assert torch.backends.mkldnn.enabled


@pytest.mark.parametrize(
    "inactive",
    [
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.dropout(x, 0.0),
        lambda x: torch.dropout(x, 0.5, train=False),
        lambda x: F.dropout(x, 0.5, training=False, inplace=True),
        lambda x: F.dropout1d(x, 0.5, training=False),
        lambda x: F.alpha_dropout(x, 0.5, training=False),
        nn.Dropout().eval(),
    ],
)
@pytest.mark.parametrize("training", [False, True])
def test_an_inactive_dropout_moves_nothing(inactive: Callable[[Tensor], Tensor], training: bool) -> None:
    """Eager returns the operand itself: no more bytes than without it, in backward neither."""
    x = torch.ones(2, 3, 8)
    assert inactive(x) is x or inactive(x).data_ptr() == x.data_ptr()
    found, plain = (
        priced(lambda x, one=one: one(x.sin()) * 2, "fp32[N=4,3,8]", training) for one in (inactive, lambda x: x)
    )
    for graph in ("forward", "backward") if training else ("forward",):
        moved, needed = (sum(op.cost.bytes for op in operators(one, "before", graph)) for one in (found, plain))
        assert moved == needed > 0
        assert "clone" not in targets(found, "before", graph)


@pytest.mark.parametrize(
    ("dtype", "width", "library"), [("bf16", 64, "cudnn"), ("bf16", 192, "flash"), ("fp32", 64, "efficient")]
)
def test_attention_has_the_name_of_what_the_target_runs(dtype: str, width: int, library: str) -> None:
    inputs = ", ".join([f"{dtype}[2,4,256,{width}]"] * 3)
    attention = case(lambda *qkv: F.scaled_dot_product_attention(*qkv), inputs, training=True)
    program = price_case(attention, target_named("h200")).program
    named = {op.name for op in program.operators if op.stage == "before" and "dot_product" in op.name}
    name = f"_scaled_dot_product_{library}_attention"
    assert named == {name, f"{name}_backward"}
    shown = [
        *(op.name for op in program.operators),
        *(end for one in program.decisions for end in (one.producer, one.consumer)),
    ]
    assert not any("for_cpu" in name for name in shown)
    assert {op.name for op in price_case(attention, CPU).program.operators if "dot_product" in op.name} == {
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"
    }  # fmt: skip


def test_the_generator_of_a_cpu_draws_one_number_after_another() -> None:
    drawn = {size: predicted(priced(F.dropout, f"fp32[N={size}]")) for size in (10**6, 3 * 10**6)}
    assert drawn[3 * 10**6] - drawn[10**6] >= 2 * 10**6 * 12e-3


def predicted(of: PricedCase) -> float:
    (dropout,) = (one for one in of.program.operators if one.stage == "before" and one.name == "native_dropout")
    return dropout.predicted_us or 0.0


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_says_why(name: str) -> None:
    model, inputs, training, error, said = REFUSED[name]
    with pytest.raises(error, match=said) as raised:
        capture(case(model, inputs, training))
    assert "_dynamo/" not in "".join(traceback.format_exception(raised.value)), "frames of PyTorch's compiler"
    assert name == "no tensors" or raised.value.__context__ is not None


def test_the_cause_of_a_refusal_is_shown_if_tracebacks_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_TRACEBACK", "1")
    with pytest.raises(CaptureError) as raised:
        capture(case(branches, "fp32[N=4]"))
    shown = "".join(traceback.format_exception(raised.value))
    assert "_dynamo/" in shown and "The above exception was the direct cause" in shown


def test_after_a_refusal_the_next_capture_works() -> None:
    with pytest.raises(CaptureError):
        capture(case(breaks, "fp32[N=4]"))
    assert capture(replace(case(torch.sin, "fp32[N=4]"))).graphs
