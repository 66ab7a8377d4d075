"""The verbs as functions: explain any model, optimise a block, time every way of running it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright
from examples import naive_softmax, transformer_block
from tests.passes.graphs import neighbours
from tilewright.compile.capture import capture
from tilewright.compile.planner import Planner
from tilewright.hardware import profiles
from tilewright.hardware.target import target_named
from tilewright.measure.timing import contest
from tilewright.records import errors
from tilewright.records.case import Case, InputSpec
from tilewright.records.errors import InputError, TilewrightError, VerificationError
from tilewright.records.input_grammar import parse_arguments
from tilewright.records.measurement import Ceiling, Verified
from tilewright.records.program import Program
from tilewright.store.run import read_program, read_rows
from tilewright.verbs import bench_case, explain_case, optimisation, optimize_case
from tilewright.verbs.bench import case_label, measure
from tilewright.verbs.subject import Subject, _written_to

BLOCK = transformer_block.case(D=32, H=4, B=2, S=16)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of all tests here: a page's scripts are bundled and equal kernels compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_home(executor: None, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of the test's own, ceilings that need no measuring, and short races."""
    monkeypatch.setenv("TILEWRIGHT_HOME", str(tmp_path))
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(cache))
    monkeypatch.setattr(profiles, "local_profile", lambda **_: profiles.profile_for("cpu"))
    monkeypatch.setattr(contest, "SECONDS", 0.02)


def case(model: Callable[..., Any], inputs: str, training: bool = False) -> Case:
    return Case("subject", lambda: model, InputSpec.parse_many(inputs), training=training)


# explain


def test_explaining_a_model_and_its_inputs() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.BatchNorm1d(16))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.ones(4, 8)
    explanation = tilewright.explain(model, x, on="h200")
    assert explanation.case.name == "Sequential" and not explanation.case.training
    assert {row.device for row in explanation.ceilings} == {"h200"}
    text = str(explanation)
    assert "addmm" in text and "before fusion:" in text and "after fusion:" in text
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(x, torch.ones(4, 8)) and x.grad is None


def test_an_explanation_shows_itself_in_a_notebook() -> None:
    html = explain_case(naive_softmax.case(N=4, M=8), "cpu")._repr_html_()
    assert "<table>" in html and "reads 5·N·M + 2·N" in html and "<script" not in html


@dataclass
class Tagged:
    logits: Tensor


class Tagger(nn.Module):
    """Called as models of Hugging Face are: by names alone, with ids, a mask and switches."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 8)
        self.tags = nn.Linear(8, 4)

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor, double: bool = False) -> Tagged:
        logits = self.tags(self.words(input_ids) * attention_mask[..., None])
        return Tagged(logits * 2 if double else logits)


IDS, MASK = torch.arange(12).view(2, 6) + 15, torch.ones(2, 6, dtype=torch.long)


def test_explaining_a_call_by_names() -> None:
    text = "input_ids=i64[B=2,S=6]<30, attention_mask=i64[B,S], double=True"
    positional, keywords = parse_arguments(text)
    named = explain_case(Case("tagger", Tagger, positional, keywords=keywords, training=False), "h200").program
    given = tilewright.explain(Tagger(), input_ids=IDS, attention_mask=MASK, double=True, on="h200").program
    assert [op.target for op in given.operators] == [op.target for op in named.operators]
    assert any(op.target == "aten.embedding.default" for op in named.operators)
    assert sum(op.cost.bytes for op in given.operators) == sum(op.cost.bytes for op in named.operators)


@pytest.mark.parametrize("training", [True, False])
def test_explaining_allocates_nothing(training: bool) -> None:
    """Weights and inputs of 40 GB each, on the meta device, drawn, or made by the class."""

    class Wide(nn.Linear):
        def __init__(self) -> None:
            super().__init__(100_000, 100_000)

    with torch.device("meta"):
        model, x = Wide(), torch.empty(100_000, 100_000)
    drawn = [InputSpec.parse("f32[N=100000,M=100000]")]
    named = explain_case(Case("wide", Wide, drawn, training=training), "h200").program
    given = tilewright.explain(model, x, on="h200", training=training).program
    product = next(op for op in named.operators if op.target == "aten.addmm.default")
    assert product.cost.bytes == 3 * 4 * 10**10 + 4 * 10**5
    assert [op.cost.bytes for op in given.operators] == [op.cost.bytes for op in named.operators]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_explaining_a_model_whose_init_reads_values() -> None:
    class Rates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Dropout(p.item()) for p in torch.linspace(0, 0.5, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))

    program = explain_case(case(Rates(), "f32[N=8]", training=True), "cpu").program
    built = explain_case(Case("rates", Rates, [InputSpec.parse("f32[N=8]")]), "cpu").program
    assert built.operators and [op.name for op in built.operators] == [op.name for op in program.operators]


def test_explaining_a_function_that_holds_tensors() -> None:
    layer, table = nn.Linear(4, 4), torch.ones(4)
    program = tilewright.explain(lambda x: layer(x["a"][0]) * table, {"a": (torch.ones(2, 4), None)}, on="h200").program
    assert any(op.target == "aten.addmm.default" for op in program.operators)


def test_explaining_draws_nothing_from_the_users_generator() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    tilewright.explain(nn.Dropout(0.5), torch.ones(4), on="cpu", training=True)
    assert torch.equal(torch.random.get_rng_state(), before)


# optimize


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers are not timed: what that takes, `tests/cli/test_explain.py` pays once."""
    monkeypatch.setattr(optimisation, "measure", lambda *_, **__: [])


def optimized(case: Case, tell: Callable[[str], None] = lambda _: None) -> tuple[Program, Program]:
    """The program as `optimize` returns it, and as the run has it."""
    done = optimize_case(case, seconds=0.1, tell=tell)
    assert done.page.is_file() and all(tensor.ok for tensor in done.verified)
    return done.program, read_program(done.run)


def test_every_pair_of_neighbours_has_its_decision() -> None:
    graphs = capture(BLOCK, Planner(target_named("cpu"))).graphs
    pairs = {(name, *pair) for name, graph in graphs.items() for pair in neighbours(graph)}
    rows = explain_case(BLOCK, "cpu").program.decisions
    assert {(row.graph, row.producer, row.consumer) for row in rows if row.passed_by == "fusion"} == pairs
    assert all(row.source is not None and row.reason for row in rows)


def normed_product(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.layer_norm(x, (16,))) @ w


def test_a_second_run_from_the_cache_shows_the_same_rows(unmeasured: None) -> None:
    subject, told = case(normed_product, "f32[N=8,M=16],f32[M=16,K=4]", training=True), list[str]()
    (_, first), (_, second) = optimized(subject, told.append), optimized(subject)
    once, again = ([replace(row, measured_us=None) for row in one.decisions] for one in (first, second))
    assert once == again
    fused = [row for row in first.decisions if row.passed_by == "fusion" and row.verdict == "taken"]
    assert fused and all(row.predicted_us is not None and row.measured_us is not None for row in fused)
    assert len(told) == 5 and told[0].startswith("measuring") and "verifying against float64" in told


@pytest.mark.parametrize("is_found", [True, False])
def test_a_case_that_beats_its_floor_has_the_ceilings_measured_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_found: bool
) -> None:
    """Ceilings of a machine that other programs kept busy: a step of microseconds had a floor of seconds."""
    true = profiles.profile_for("cpu")
    slow = replace(true, copy_GBps=1e-6, read_GBps=1e-6, write_GBps=1e-6, l2_GBps=1e-6)
    monkeypatch.setattr(profiles, "local_profile", lambda **_: slow)
    monkeypatch.setattr(profiles, "remeasured_profile", lambda _: true if is_found else None)
    monkeypatch.setattr(optimisation, "measure", partial(measure, impls=["tilewright"]))
    monkeypatch.setattr(errors, "_warned", set())
    told: list[str] = []
    done = optimize_case(naive_softmax.case(N=8, M=16), tell=told.append, seconds=0.1)
    again = next(at for at, line in enumerate(told) if "again: the case took less than its floor" in line)
    # The same kernels are priced again, and neither compiled nor timed.
    assert told[again + 1 :] == ["pricing every operator, racing every fusion"] * is_found
    launches = [launch for launch in done.program.operators if launch.stage == "after"]
    assert all(launch.measured_us for launch in [*launches, *done.program.regions])
    outcome = optimisation._Outcome(done.program, [], [])
    others = [replace(region, source_code="") for region in done.program.regions]
    assert outcome.runs_as(done.program) and not outcome.runs_as(replace(done.program, regions=others))
    ours = next(row.median_us for row in done.measurements if row.impl == "tilewright")
    floor = sum(launch.floor_us or 0.0 for launch in done.program.operators if launch.stage == "after")
    kept = {row.value for row in read_rows(done.run, Ceiling) if row.kind == "copy"}
    assert (ours > floor) == is_found and kept == {(true if is_found else slow).copy_GBps}
    assert ("less than its floor of" in capsys.readouterr().err) != is_found


def test_a_call_by_names_is_verified_with_its_own_values(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr(optimisation, "measure", lambda *_, seconds, **__: given.append(seconds) or [])
    done = tilewright.optimize(Tagger(), input_ids=IDS, attention_mask=MASK, training=True, seconds=1.5)
    assert {v.tensor for v in done.verified} == {"output.logits", "words.weight", "tags.weight", "tags.bias"}
    assert all(tensor.ok for tensor in done.verified)
    assert done.case.name == "Tagger" and given == [1.5]


@pytest.mark.parametrize("breaks", [torch._dynamo.graph_break, None])
def test_a_case_that_is_not_one_graph_is_measured_in_its_pieces_and_verified(
    monkeypatch: pytest.MonkeyPatch, breaks: Callable[[], None] | None
) -> None:
    def cut(x: Tensor) -> Tensor:
        y = x.sin() * 2
        if breaks is None and y.sum() > 1e9:
            return y
        if breaks is not None:
            breaks()
        return y.cos() + 1

    monkeypatch.setenv("TILEWRIGHT_STRICT", "0")
    monkeypatch.setattr(optimisation, "measure", partial(measure, impls=["eager", "tilewright"]))
    done = optimize_case(case(cut, "f32[N=64]"), seconds=0.05)
    kernels = [op for op in done.program.operators if op.target == "kernel"]
    assert [op.name.partition(":")[0] for op in kernels] == ["graph 1", "graph 2"]
    assert all(op.measured_us and op.floor_us for op in kernels)
    assert [(v.tensor, v.ok) for v in done.verified] == [("output", True)]
    assert "the call that breaks the graph" in [fallback.what for fallback in done.program.fallbacks]
    assert str(done).startswith("Inference (--training adds backward): tilewright takes")


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.tensor([]), x.flatten()]) * torch.tensor([2.0])


@pytest.mark.parametrize("training", [False, True])
def test_tensors_that_the_code_makes_are_timed_too(monkeypatch: pytest.MonkeyPatch, training: bool) -> None:
    monkeypatch.setattr(optimisation, "measure", lambda *_, **__: [])
    done = tilewright.optimize(Doubled(), torch.randn(4, 8, requires_grad=training), training=training)
    assert all(row.ok for row in done.verified)
    assert all(op.measured_us for op in done.program.operators if op.stage == "before")
    # What is there before the program runs is no launch of it.
    assert not [op for op in done.program.operators if "constant" in op.name]


class Tags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def test_a_function_that_dynamo_skips_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_STRICT", "0")
    monkeypatch.setattr(optimisation, "measure", partial(measure, impls=["eager", "tilewright"]))
    done = optimize_case(case(Tags(), "f32[S=4,B=2,D=8]"), seconds=0.05)
    assert "runs as PyTorch runs it: the function forward at test_verbs.py" in str(done)
    assert "torch._dynamo.config.allow_rnn = True" in str(done)


# bench


def rows_of(case: Case, *impls: str) -> dict[str, Any]:
    _, rows = bench_case(case, suite="suite", impls=impls, seconds=0.05)
    return {row.impl: row for row in rows}


def test_bench_times_every_way_in_one_run() -> None:
    rows = rows_of(naive_softmax.case(N=64, M=32), "eager", "eager-sdpa", "tilewright")
    assert set(rows) == {"eager", "eager-sdpa", "tilewright"}
    ours = rows["tilewright"]
    assert (ours.suite, ours.case, ours.direction) == ("suite", "N64 M32 float32", "infer")
    # Reads and writes of 64×32 floats; one pooled result, small enough for PyTorch's own allocator.
    assert ours.bytes == 2 * 64 * 32 * 4 and ours.flops == 4 * 64 * 32
    assert ours.peak_bytes == 64 * 32 * 4 < rows["eager"].peak_bytes
    assert ours.error is not None and ours.error < 1e-6
    assert all(row.eager_error is not None and row.error <= 2 * row.eager_error for row in rows.values())
    assert all(row.p20_us <= row.median_us <= row.p80_us and row.repeats >= 7 for row in rows.values())


def test_bench_does_not_time_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Verified("fwd", "output", "float32", 1.0, 0.0, 1.0, 0.0, 1e-6, 1e-6, ok=False)
    monkeypatch.setattr("tilewright.measure.truth.verify.verify", lambda *_, **__: [wrong])
    with pytest.raises(VerificationError, match="softmax: the numbers contract is broken for output"):
        bench_case(naive_softmax.case(N=4, M=4), suite="s", impls=["eager"])


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"result": self.dropout(self.norm(x)), "name": "normed", "parts": [x.sum(), None]}


def writes(x: Tensor) -> Tensor:
    x.mul_(-1)
    return x * 2


@pytest.mark.parametrize("impl", ["eager", "tilewright"])
@pytest.mark.parametrize(
    ("model", "inputs", "training"),
    [
        (Normed(), "fp32[B=4,8]", True),
        (Normed().eval(), "fp32[B=4,8]", False),
        (lambda x, i: (x[i].exp(), x.sum()), "fp32[N=9,M=8],i64[K=3]", True),
        (lambda i: i * 2, "i64[N=4]", True),
        (writes, "fp32[N=4]", False),
        (lambda x: (x.sin(), x), "fp32[N=4]", True),
    ],
    ids=["buffers and a dict", "evaluation", "indices", "integers alone", "written input", "input returned"],
)
def test_any_model_can_be_called_again_and_again(
    model: Callable[..., Any], inputs: str, training: bool, impl: str
) -> None:
    subject = Subject(case(model, inputs, training))
    for _ in range(3):
        subject.call(impl)
    assert all(tensor.grad is None for tensor in subject.inputs)
    assert {fallback.why for fallback in subject.recording.fallbacks} <= {"it has no row in the operator table"}
    assert (impl == "tilewright") == bool(subject.recording.graphs)


def test_inputs_that_eager_refuses_are_named() -> None:
    with pytest.raises(InputError, match=r"subject fails on its inputs at .*py:\d+: .*\n  IndexError: .*a range"):
        Subject(case(lambda x, i: x[i], "f32[N=1,M=4],i64[K=9]"))


def test_the_warm_peer_takes_several_results() -> None:
    subject = Subject(case(lambda x: {"a": x.sin(), "b": (x.cos(), 3)}, "fp32[N=4]"))
    held: list[list[Tensor]] = []

    def remember(out: list[Tensor], x: Tensor) -> None:
        held.append(out)
        _written_to(subject.model)(out, x)

    peer = subject._into_warm_output(remember)
    peer(*subject.inputs)
    peer(*subject.inputs)
    (x,) = subject.inputs
    assert held[0] is held[1]
    torch.testing.assert_close(held[0], [x.sin(), x.cos()])


def test_a_case_is_labelled_with_its_sizes() -> None:
    assert case_label(BLOCK) == "B2 S16 D32 H4 float32"
    assert case_label(Case("none", lambda: print, [])) == ""


def test_results_show_themselves_at_pythons_prompt() -> None:
    explained = tilewright.explain(nn.GELU(), torch.randn(8, 8), on="h200")
    assert repr(explained) == str(explained) and "gelu" in repr(explained) and "Explanation(" not in repr(explained)


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return x * scale


@pytest.mark.parametrize(
    ("model", "inputs", "said"),
    [
        (Scaled(), (torch.ones(3), 3, 4), "does not take 3 inputs"),
        (Scaled(), (), r"Scaled\(x: torch.Tensor, scale: float = 2.0\) -> torch.Tensor does not take 0 inputs"),
        (5, (torch.ones(3),), "expected a module or a function, not 5 of type int"),
    ],
)
def test_what_a_model_cannot_take_is_named(model: Any, inputs: tuple[Any, ...], said: str) -> None:
    for verb in (tilewright.explain, tilewright.optimize):
        with pytest.raises(TilewrightError, match=said):
            verb(model, *inputs)
