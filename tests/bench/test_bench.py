"""The bench of an operator: which races a choice names, what a row says, who is refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.measure.racing.cheats import reference, skipped_rows, suite
from tilewright import bench
from tilewright.bench import RaceResult, bench_suite, benchmark, faults, races, remarks
from tilewright.measure.racing.ceiling_probe import Limit
from tilewright.measure.racing.race import VariantResult
from tilewright.measure.racing.results import append_results, read_results
from tilewright.measure.timing.benchmark import Timing
from tilewright.records.errors import UsageError
from tilewright.records.measurement import Ceiling, Measurement
from tilewright.records.suite import Variant
from tilewright.records.suite_filter import SuiteFilter

pytestmark = pytest.mark.usefixtures("short_races")
SHAPES = [(4, 8), (16, 32), (5, 7)]


def names(choice: SuiteFilter) -> list[str]:
    return [f"{workload.name} {direction}" for workload, direction in races(suite(reference), choice)]


def test_a_choice_names_its_races_in_order() -> None:
    assert names(SuiteFilter()) == ["64x257 float32 fwd", "64x257 float32 bwd"]
    chosen = SuiteFilter(shapes=SHAPES[:2], dtypes=["float32", "bfloat16"], directions=["bwd"])
    assert names(chosen) == ["4x8 float32 bwd", "4x8 bfloat16 bwd", "16x32 float32 bwd", "16x32 bfloat16 bwd"]


def test_shards_are_the_whole() -> None:
    whole = names(SuiteFilter(shapes=SHAPES))
    parts = [names(SuiteFilter(shapes=SHAPES, shard=(i, 4))) for i in range(1, 5)]
    assert sorted(name for part in parts for name in part) == sorted(whole)
    assert [len(part) for part in parts] == [2, 2, 1, 1]


def run(choice: SuiteFilter, *others: Variant) -> list[RaceResult]:
    return bench_suite(suite(reference, *others), choice, seconds=0.05)


def test_a_row_says_what_was_measured() -> None:
    (result,) = run(SuiteFilter(shapes=[(64, 32)], directions=["fwd"]))
    row = next(row for row in result.rows if row.impl == "suspect")
    assert (row.suite, row.case, row.direction) == ("ramp", "64x32 float32", "fwd")
    assert row.bytes == 2 * 64 * 32 * 4 and row.flops is None
    # What is clamped and what is returned, and three scalars.
    assert row.peak_bytes is not None and 0 <= row.peak_bytes - 2 * 64 * 32 * 4 <= 64
    assert row.GBps == pytest.approx(row.bytes / row.median_us / 1e3)
    assert row.of_ceiling == pytest.approx(row.GBps / result.limit)
    assert row.predicted_us == pytest.approx(row.median_us * row.of_ceiling)
    # 3x is rounded: half an ulp at most.
    assert row.error == row.eager_error and row.error is not None and 0 < row.error < 2**-24
    assert row.p20_us <= row.median_us <= row.p80_us and row.repeats >= 10
    assert re.fullmatch(r"ramp 64x32 float32 fwd · copy [\d.,]+ GB/s", result.title)
    assert [replace(result, limit=limit).title.split("· ")[1] for limit in (4255.4, 99.96, 0.01682)] == [
        "copy 4,255 GB/s",
        "copy 100 GB/s",
        "copy 0.0168 GB/s",
    ]


def test_only_those_that_go_a_direction_are_raced_in_it() -> None:
    forward = Variant("forward only", "torch", reference, directions=("fwd",))
    ran = run(SuiteFilter(shapes=[(4, 8)]), forward)
    assert [sorted(row.impl for row in result.rows) for result in ran] == [
        ["eager", "forward only", "suspect"],
        ["eager", "suspect"],
    ]
    (chosen,) = run(SuiteFilter(shapes=[(4, 8)], impls=["eager"], directions=["fwd"]))
    assert [row.impl for row in chosen.rows] == ["eager"]


def test_ways_of_another_device_are_raced_only_when_asked_for() -> None:
    kernel = Variant("tilewright-triton", "triton", reference)
    (result,) = run(SuiteFilter(shapes=[(4, 8)], directions=["fwd"]), kernel)
    assert [outcome.impl for outcome in result.outcomes] == ["suspect", "eager"]
    (result,) = run(SuiteFilter(shapes=[(4, 8)], directions=["fwd"], impls=["tilewright-triton"]), kernel)
    assert [(outcome.impl, outcome.refusal) for outcome in result.outcomes] == [
        ("tilewright-triton", "its kernel is for GPUs")
    ]
    assert result.rows == [] and faults(result) == []


def test_who_is_refused_has_no_row_and_a_reason(tmp_path: Path) -> None:
    def refuses(_: object) -> str | None:
        return "too small"

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("never")

    others = [
        Variant("cheat", "torch", skipped_rows()),
        Variant("tilewright-cheat", "torch", skipped_rows()),
        Variant("choosy", "torch", reference, refuses=refuses),
        Variant("broken", "torch", fails),
        Variant("tilewright-broken", "torch", fails),
    ]
    (result,) = run(SuiteFilter(shapes=[(40, 8)], directions=["fwd"]), *others)
    assert sorted(row.impl for row in result.rows) == ["eager", "suspect"]
    where = "ramp 40x8 float32 fwd: "
    said = [line.removeprefix(where) for line in remarks(result) if line.startswith(where)]
    assert said[0].startswith("cheat refused: fwd output 0 is wrong")
    assert said[1].startswith("tilewright-cheat refused: fwd output 0 is wrong")
    assert said[2:] == [
        "choosy refused: too small",
        "broken refused: NotImplementedError: never",
        "tilewright-broken refused: NotImplementedError: never",
    ]
    assert faults(result) == [where + said[1], where + said[4]], "a peer that is wrong is no fault of the bench"
    path = tmp_path / "ramp.jsonl"
    older = [row for row in result.rows if row.impl == "eager"]
    append_results(path, [replace(older[0], impl="cheat"), replace(older[0], impl="choosy")])
    append_results(path, result.rows, gone=result.invalidates)
    assert [row.impl for row in read_results(path)] == ["choosy", "eager", "suspect"]


TIMING = Timing(10.0, 9.0, 11.0, 20, converged=True)


@pytest.mark.parametrize(
    ("rate", "device", "note", "refusal"),
    [
        (4000.0, "cuda", [], None),
        (4700.0, "cuda", [], None),
        (4800.0, "cuda", ["above the bandwidth of memory: L2 held the data"], None),
        (9001.0, "cuda", [], "9,001 GB/s is more than L2 was measured to give, 9,000 GB/s"),
        (9001.0, "cpu", ["above the bandwidth of memory: a cache of the CPU held the data"], None),
    ],
)
def test_above_the_bandwidth_of_memory_the_level_is_named(
    monkeypatch: pytest.MonkeyPatch, rate: float, device: str, note: list[str], refusal: str | None
) -> None:
    monkeypatch.setattr(bench, "_l2_GBps", lambda *_: 9000.0)
    outcome = VariantResult("mine", TIMING)
    bench._check_rate(outcome, rate, 4650.0, device, "copy")
    assert (outcome.notes, outcome.refusal, outcome.invalid) == (note, refusal, refusal is not None)
    assert (outcome.timing is None) == (refusal is not None)


@pytest.mark.parametrize(
    ("limit", "GBps"), [("read", 9000.0), ("write", 4500.0), ("copy", 13500.0), ("matmul", 13500.0)]
)
def test_the_most_that_l2_gives(monkeypatch: pytest.MonkeyPatch, limit: Limit, GBps: float) -> None:
    """13 TB/s are no error where two bytes are read for each that is written: an H200 moves 10.9 so."""
    rates = {"cache": 8000.0, "cache read": 9000.0, "cache write": 4500.0}
    kept = [Ceiling("GPU", kind, "float32", value, "GB/s", "measured") for kind, value in rates.items()]
    monkeypatch.setattr(bench, "_device_name", lambda _: "GPU")
    monkeypatch.setattr("tilewright.hardware.ceilings.kept_ceilings", lambda _: kept)
    assert bench._l2_GBps("cuda", limit) == GBps
    monkeypatch.setattr("tilewright.hardware.ceilings.kept_ceilings", lambda _: kept[:1])
    assert bench._l2_GBps("cuda", limit) == 8000.0


def test_functions_race_on_inputs_like_these() -> None:
    x = torch.zeros(8, 4, dtype=torch.bfloat16)
    done = benchmark({"double": lambda x: x + x, "zero": lambda x: x * 0}, x, directions=("fwd", "bwd"), seconds=0.05)
    assert [(result.direction, result.workload.name) for result in done.races] == [
        ("fwd", "bfloat16"),
        ("bwd", "bfloat16"),
    ]
    assert [row.bytes for result in done.races for row in result.rows if row.impl == "double"] == [128, 192]
    # A function that takes zeros for granted is wrong on values of the bench's own.
    assert "zero refused: fwd output 0 is wrong" in str(done)
    assert "<caption>double zero bfloat16 fwd" in done._repr_html_()
    with pytest.raises(UsageError, match="needs a function and an input"):
        benchmark({}, x)
    with pytest.raises(UsageError, match="by name"):
        benchmark(torch.exp, x)  # type: ignore[arg-type]


@pytest.mark.parametrize(("device", "generated_us", "said"), [("cuda", 1.04, 1), ("cuda", 1.06, 0), ("cpu", 1.0, 0)])
def test_a_hand_written_kernel_must_beat_the_generated_one(device: str, generated_us: float, said: int) -> None:
    ((workload, direction),) = races(suite(reference), SuiteFilter(directions=["fwd"]))
    times = {"tilewright": 1.0, "generated": generated_us}
    rows = [Measurement("toy", workload.name, impl, direction, us, us, us, 9) for impl, us in times.items()]
    found = remarks(RaceResult(suite(reference), workload, direction, rows, [], 1.0, device))
    assert len(found) == said and all("1.04× the speed of the generated one" in line for line in found)
