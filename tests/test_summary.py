"""The speed bars, checked from result files written by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import summary
from benchmarks.summary import BARS, Results, Verdict, read_all, verdicts
from tilewright.measure.racing.results import write_results
from tilewright.records.measurement import Measurement

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
