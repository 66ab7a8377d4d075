"""The figures in the documents are those of the result files."""

from __future__ import annotations

import pytest

from benchmarks.summary import ROOT, Results, read_all
from benchmarks.tables import DOCUMENTS, TABLE, TABLES, markdown, rewritten
from tilewright.records.measurement import Direction, Measurement

COPY = 4000.0


def row(suite: str, case: str, impl: str, direction: Direction, us: float, GBps: float | None = None) -> Measurement:
    share = None if GBps is None else GBps / COPY
    return Measurement(suite, case, impl, direction, us, us, us, 9, GBps=GBps, of_ceiling=share)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_hold_the_figures_of_the_result_files(document) -> None:
    text = document.read_text(encoding="utf-8")
    assert rewritten(text, read_all(ROOT / "h200")) == text, "run python -m benchmarks.tables"


def test_every_table_stands_in_a_document() -> None:
    named = [found["name"] for path in DOCUMENTS for found in TABLE.finditer(path.read_text(encoding="utf-8"))]
    assert sorted(named) == sorted(TABLES)


def test_text_around_a_table_stays() -> None:
    text = "before\n<!-- table: norms -->\nold | figures\n<!-- /table -->\nafter\n"
    rows = [row("rms_norm", "65536x4096 bf16", "tilewright", "fwd", 250.0, 3000.0)]
    rows.append(row("layer_norm", "65536x4096 bf16", "tilewright", "bwd", 500.0, 2000.0))
    rows.append(row("layer_norm", "3x4096 bf16", "tilewright", "fwd", 5.0, 1.0))
    new = rewritten(text, Results(rows))
    assert new.startswith("before\n<!-- table: norms -->\n| columns |") and new.endswith("|\n<!-- /table -->\nafter\n")
    assert "old" not in new
    assert "| 4096 | – | 0.75 | – | – | 0.50 | – | – | – |\n" in new


def test_a_table_that_nothing_makes_is_refused() -> None:
    with pytest.raises(KeyError, match="elsewhere"):
        rewritten("<!-- table: elsewhere -->\n<!-- /table -->\n", Results([]))


def test_attention_is_held_against_the_faster_of_the_peers_in_its_own_race() -> None:
    rows = [row("attention", "d64 S512 causal", "tilewright", "fwd", 80.0)]
    rows.append(row("attention", "d64 S512 causal", "cudnn", "fwd", 100.0))
    rows.append(row("attention", "d64 S512 causal", "flash2", "fwd", 72.0))
    rows.append(row("attention", "d64 S512 causal", "cudnn", "bwd", 8.0))
    table = TABLES["attention forward"](Results(rows))
    assert "| d 64, causal | 0.90 | – | – | – | – | – |\n" in table
    assert "| d 64 | – | – | – | – | – | – |\n" in table


def test_ways_come_slowest_first_with_what_limits_them() -> None:
    rows = [
        row("gelu", "16384x16384 bf16", impl, "fwd", us, 1e6 / us)
        for impl, us in (("tilewright", 250.0), ("eager", 1500.0))
    ]
    rows.append(row("softmax", "65536x8192 bf16", "tilewright", "fwd", 1.0, COPY))
    lines = TABLES["gelu"](Results(rows)).splitlines()
    assert lines[2].startswith("| `eager` | 1.50 ms | 0.17 | – | – | memory")
    assert lines[3].startswith("| `tilewright` | 250 µs | 1.00 | – | – | memory")


def test_columns_of_figures_are_flush_right() -> None:
    assert (
        markdown(["way", "time", "why"], [["a", "1 µs", "x"], ["b", "–", "–"]]).splitlines()[1]
        == "| --- | ---: | --- |"
    )
