"""The figures in the documents are those of the result files."""

import pytest

from benchmarks.summary import ROOT, Results, read_all
from benchmarks.tables import DOCUMENTS, TABLE, TABLES, rewritten
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
