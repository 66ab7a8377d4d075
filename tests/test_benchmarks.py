"""`benchmarks/`: it imports; bars, pictures, rows of models and their launches, from files and models made here."""

import importlib
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks import summary, versions
from benchmarks.curves import distance, train
from benchmarks.model_launches import LaunchRow, differences, explained, fitted, launch_rows, read, work_of, write
from benchmarks.model_launches import table as launch_table
from benchmarks.model_runs import Request, run
from benchmarks.model_table import lines, table
from benchmarks.model_zoo import DECODERS, MODELS, Scored, Size, Workload
from benchmarks.row_plot import SUITES, chart, points
from benchmarks.summary import BARS, Results, Verdict, read_all, verdicts
from tilewright import backend
from tilewright.cost.work import Work, predicted_us
from tilewright.hardware.profiles import profile_for
from tilewright.measure.racing.results import read_results, write_results
from tilewright.records.measurement import Direction, Measurement

COPY = 4000.0


def row(suite: str, case: str, direction: str, share: float, impl: str = "tilewright", **more: object) -> Measurement:
    """A row at a share of the copy bandwidth; a share of 0.5 takes twice as long as one of 1."""
    made = Measurement(suite, case, impl, direction, 100 / share, 1, 1, 9, GBps=COPY * share, of_ceiling=share)  # type: ignore[arg-type]
    return replace(made, **more)  # type: ignore[arg-type]


def found(*rows: Measurement) -> dict[str, Verdict]:
    return {verdict.bar.what: verdict for verdict in verdicts(Results(rows))}


def test_row_kernels_are_judged_together_and_at_their_worst() -> None:
    judged = found(
        row("softmax", "65536x8192 bf16", "fwd", 0.99),
        row("layer_norm", "65536x4096 bf16", "fwd", 0.90),
        row("softmax", "100x5000 bf16", "fwd", 0.1),
    )
    together, worst = judged["row kernels forward, of copy, together"], judged["row kernels forward, of copy"]
    assert together.figure == pytest.approx((0.99 * 0.90) ** 0.5) and together.rows == 2 and not together.reached
    assert worst.figure == pytest.approx(0.90) and worst.worst == "0.9 at layer_norm 65536x4096 bf16"
    assert judged["row kernels backward, of copy"].figure is None


def test_another_limit_is_turned_into_a_share_of_copy() -> None:
    reads = row("cross_entropy", "2048x131072 bf16", "fwd", 1.05, of_ceiling=0.99)
    judged = found(row("softmax", "65536x8192 bf16", "fwd", 0.98), reads)
    assert judged["row kernels forward, of copy, together"].figure == pytest.approx((0.98 * 1.05) ** 0.5)


def test_the_best_peer_of_the_same_race_counts() -> None:
    case = ("softmax", "65536x8192 bf16", "fwd")
    rows = [row(*case, 0.9), row(*case, 0.95, "liger"), row(*case, 0.5, "torch"), row(*case, 0.99, "quack")]
    elsewhere = row("softmax", "65536x4096 bf16", "fwd", 0.999, "liger")
    judged = found(*rows, elsewhere)["row kernels forward, × best peer"]
    assert judged.figure == pytest.approx(0.9 / 0.95) and judged.rows == 1 and not judged.reached


def test_memory_beyond_inputs_and_gradients() -> None:
    gradients = 2 * (8192 * 4096 + 131072 * 4096)
    case = ("linear_cross_entropy", "8192x4096x131072 16-bit", "fwd+bwd", 0.7)
    name = "linear + cross entropy, 1 GiB over memory"
    assert found(row(*case, peak_bytes=gradients + 2**30))[name].reached
    assert not found(row(*case, peak_bytes=gradients + 2**30 + 1))[name].reached


def test_every_bar_is_printed_and_missed_without_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_results(tmp_path / "softmax.jsonl", [row("softmax", "65536x8192 bf16", "fwd", 0.99)])
    (tmp_path / "contract.jsonl").write_text('{"example": "no bench row"}\n')
    assert len(read_all(tmp_path).rows) == 1
    assert summary.main(tmp_path) == 1
    printed = capsys.readouterr().out
    assert "copy 4,000 GB/s" in printed and printed.count("no row") == len(BARS) - 2
    assert all(bar.what in printed for bar in BARS)


BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_a_benchmark_imports(name: str) -> None:
    assert importlib.import_module(f"benchmarks.{name}").__doc__


ROW = Measurement("softmax", "65536x4096 bf16", "tilewright", "fwd", 250.0, 1.0, 1.0, 9, GBps=4000.0, of_ceiling=1.0)
ROWS = [
    ROW,
    replace(ROW, case="1024x262144 bf16", GBps=3900.0),
    replace(ROW, case="1048576x256 bf16", impl="torch", GBps=2000.0),
    replace(ROW, impl="tilewright-triton"),
    replace(ROW, direction="bwd"),
    replace(ROW, case="65536x4096 fp32"),
    replace(ROW, case="100x5000 bf16"),
]


def test_full_sized_rows_of_the_way_a_user_gets_and_its_peers_from_short_to_long() -> None:
    drawn = points(Results(ROWS), "softmax")
    assert [(point["columns"], point["way"], point["GBps"]) for point in drawn] == [
        ("256", "PyTorch", 2000.0),
        ("4,096", "tilewright", 4000.0),
        ("262,144", "tilewright", 3900.0),
    ]
    assert all(3900 <= point["copy"] <= 4000 for point in drawn)


def test_there_is_a_panel_for_each_operator() -> None:
    panels = chart(Results(ROWS)).to_dict()["concat"]
    assert [panel["title"].split(",")[0] for panel in panels] == [*SUITES.values()]


def timed(case: str, impl: str, us: float, direction: Direction = "infer", peak: int | None = None) -> Measurement:
    return Measurement("models", case, impl, direction, us, us, us, 9, peak_bytes=peak, launches=7, gpu_us=us / 2)


def test_rows_of_a_model_in_inference_and_training(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    run(Request("unet", "cpu", True, ("infer", "train"), ("eager",), 0.2, tmp_path))
    rows = read_results(tmp_path / "unet.jsonl")
    assert {(row.case, row.direction, row.impl) for row in rows} == {
        ("unet B1 16x16 fp32", "infer", "eager"),
        ("unet B1 16x16 fp32", "step", "eager"),
    }
    for row in rows:
        assert row.peak_bytes and row.first_call_us
        # Eager is compared with float64 as the others are.
        assert row.error == row.eager_error and row.error is not None and 0 < row.error < 1e-4


def test_decoding_attends_to_the_token_that_it_writes() -> None:
    workload = DECODERS["llama-B1"](Size(tiny=True))
    first = workload.model(**workload.inputs)
    cached = workload.model.blocks[0].keys  # type: ignore[index,union-attr]
    assert torch.equal(workload.model(**workload.inputs), first)
    # What stands at the position before the call is overwritten, what stands elsewhere counts.
    cached[:, :, -1] = 7.0  # type: ignore[index,operator]
    assert torch.equal(workload.model(**workload.inputs), first)
    cached[:, :, 0] = 7.0  # type: ignore[index,operator]
    assert not torch.equal(workload.model(**workload.inputs), first)


def test_a_run_of_the_tests_replaces_an_older_one_of_the_same_versions(tmp_path: Path) -> None:
    assert versions.counts("2 failed, 7 passed, 1 skipped in 3.1s") == {"failed": 2, "passed": 7, "skipped": 1}
    row = {"torch": "2.9.1", "triton": "3.5.0", "python": "3.12", "device": "CPU", "passed": 7, "failed": []}
    path = tmp_path / "versions.jsonl"
    for changed in ({}, {"torch": "2.10.0"}, {"device": "a GPU"}, {"passed": 8}):
        versions.keep(row | changed, path)
    found = [(one["torch"], one["device"], one["passed"]) for one in versions.read(path)]
    assert found == [("2.9.1", "CPU", 8), ("2.10.0", "CPU", 7), ("2.9.1", "a GPU", 7)]


class Dropped(nn.Module):
    """Least squares behind dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 1), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Scored:
        found = self.dropout(self.linear(x))
        return Scored((found - 1).square().mean(), found)


def test_a_step_behind_dropout_is_compared_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "dropped", lambda size: Workload(Dropped(), {"x": torch.randn(64, 8)}, "B64"))
    (tmp_path / "go").touch()
    run(Request("dropped", "cpu", True, ("train",), ("eager", "tilewright"), 0.1, tmp_path))
    rows = read_results(tmp_path / "dropped.jsonl")
    assert [row.impl for row in rows] == ["eager", "tilewright"]
    for row in rows:
        assert row.error is not None and row.error < 1e-5 and row.note == "compared with float64 without dropout"


def test_a_row_says_why_it_was_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Single(nn.Linear):
        def forward(self, x: Tensor) -> Scored:
            if x.dtype == torch.float64:
                raise NotImplementedError("no kernel for float64")
            return Scored(super().forward(x).square().mean(), None)

    monkeypatch.setitem(MODELS, "single", lambda size: Workload(Single(8, 1), {"x": torch.randn(64, 8)}, "B64"))
    (tmp_path / "go").touch()
    run(Request("single", "cpu", True, ("infer",), ("eager",), 0.1, tmp_path))
    (row,) = read_results(tmp_path / "single.jsonl")
    assert row.error is None and row.note == "not compared with float64: NotImplementedError: no kernel for float64"


def test_runs_of_a_model_begin_with_the_same_weights_and_differ_by_what_is_drawn() -> None:
    model, inputs = Dropped(), {"x": torch.randn(64, 8)}
    first, again, other = (train(model, model, inputs, 200, seed) for seed in (0, 0, 1))
    assert first.losses == again.losses and len(first.seconds) == 200
    assert sum(first.losses[-50:]) < sum(first.losses[:50])
    assert distance(first.losses, again.losses) == 0 < distance(first.losses, other.losses)
    # The last five of 25 steps are a window, too.
    assert distance([1.0] * 25, [1.0] * 20 + [1.5] * 5) == 0.5


def test_table_pairs_entrants_of_one_means_and_lists_the_slowest_first() -> None:
    rows = [
        timed("vit B2 bf16", "eager", 300.0),
        timed("vit B2 bf16", "inductor", 100.0, peak=100),
        timed("vit B2 bf16", "tilewright", 50.0, peak=50),
        timed("vit B2 bf16", "inductor-reduce-overhead", 40.0),
        timed("vit B2 bf16", "tilewright-reduce-overhead", 80.0),
        timed("vit B2 bf16", "tilewright", 50.0, "step"),
    ]
    made = lines(rows)
    assert [(line.by, line.ratio) for line in made] == [("replay", 0.5), ("calls", 2.0)]
    assert made[1].memory == 0.5 and made[1].of_eager == 6.0
    text = table(rows).splitlines()
    assert text[1].split()[:4] == ["vit", "infer", "B2", "bf16"] and "0.05 / 0.03" in text[2]
    assert "infer, calls, 1 cases: 2.00 × Inductor (worst 2.00), 6.00 × eager" in text[3]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.linear(self.norm(x)), -1)


def launch_row(what: str, generated: bool, kernels: tuple[str, ...], recipe: tuple[str, ...] = ()) -> LaunchRow:
    return LaunchRow("m", "infer", "forward", what, what, generated, 8.0, 6.0, None, kernels, recipe)


def test_a_fit_of_one_half_of_the_models_predicts_the_other() -> None:
    """Kernels of which the times follow the model of time, twice as long as an H200's."""
    h200 = profile_for("h200")
    works = [Work("pointwise", size, size, flops) for size in (10**5, 10**6, 10**7, 10**8) for flops in (0, 99 * size)]
    rows = [
        replace(launch_row("add", True, ()), model=model, work=asdict(work), measured_us=2 * predicted_us(work, h200))
        for model in "ab"
        for work in works
    ]
    half, other, every, *_ = fitted(rows, h200).splitlines()
    for line in (half, other, every):
        median, p95 = (float(figure.strip("%")) for figure in line[46:].split()[:2])
        assert median < 2 and p95 < 10, line


def test_launches_are_those_of_the_call_with_their_work(tmp_path: Path) -> None:
    model, x = Small(), torch.randn(4, 32)
    with backend.recording() as record:
        compiled = torch.compile(model, backend=backend.backend)
        step: Callable[[], object] = lambda: compiled(x)  # noqa: E731
        step()
    rows = launch_rows("small", "infer", record, step, "cpu", profile_for("cpu"))
    assert [row.generated for row in rows] == [True, False, True]
    assert all(row.measured_us > 0 and row.error is not None for row in rows)
    write(tmp_path / "rows", rows)
    again = read(tmp_path / "rows")
    assert work_of(again[1]).products == ((1, 4, 8, 32),)
    text = launch_table(again)
    assert "product" in text and "ALL                                          3" in text and "small infer" in text


def test_a_plan_without_the_device_names_what_is_planned_on_it() -> None:
    planned = explained(Workload(Small(), {"x": torch.randn(4, 32)}, "B4"), False, profile_for("h200"))
    assert isinstance(planned, list)
    assert [graph for graph, _, _ in planned] == ["forward"] * 3 and planned[1][2] == "aten.addmm.default"

    class Broken(Small):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    why = explained(Workload(Broken(), {"x": torch.randn(4, 32)}, "B4"), False, profile_for("h200"))
    assert isinstance(why, str) and "not one graph" in why


def test_the_inputs_of_a_model_want_no_gradient() -> None:
    planned = explained(Workload(nn.Linear(32, 8), {"input": torch.randn(16, 32)}, "B16"), True, profile_for("h200"))
    products = [what for graph, _, what in planned if graph == "backward" and "mm" in what]
    assert products == ["aten.mm.default"], "that of the weight alone"


def test_each_name_that_differs_is_told() -> None:
    ran = [
        launch_row("forward0_gelu", True, ("forward0_gelu", "forward0_gelu_after")),
        launch_row("tilewright.norm.default", False, ("void norm_rows<4>(float*)",), ("norm_rows",)),
        launch_row("aten.mm.default", False, ("nvjet_192x128",)),
    ]
    planned = [("forward", str(i), row.what) for i, row in enumerate(ran)]
    assert differences(planned, ran) == []
    # A call that launches nothing is planned, and not seen.
    assert differences([*planned, ("forward", "a", "aten.lift_fresh.default")], ran) == []
    assert differences(planned[1:], ran) == ["forward0_gelu: 0 planned, 1 ran"]
    assert differences([*planned, planned[1]], ran) == ["tilewright.norm.default: 2 planned, 1 ran"]
    other = [replace(ran[0], kernels=("triton_poi_fused",)), replace(ran[1], kernels=("rows_by_cluster",)), ran[2]]
    assert differences(planned, other) == [
        "forward0_gelu ran as triton_poi_fused",
        "tilewright.norm.default ran as rows_by_cluster, not as norm_rows",
    ]
