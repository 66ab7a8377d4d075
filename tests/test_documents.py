"""The documents: figures are those of the result files, every claim has a row, packages are in the checked order."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tilewright
from benchmarks.claims import CHINESE, ENGLISH, PAGE, Language, chinese, page, results
from benchmarks.summary import ROOT as RESULTS
from benchmarks.summary import Results, read_all, verdicts
from benchmarks.tables import DOCUMENTS, TABLE, TABLES, rewritten
from benchmarks.todays import ALL, FOOTNOTE, is_todays
from examples.claims.check import documents
from tests.copied_sources import change_a_line, copied_sources
from tilewright.bench.catalogue import suite
from tilewright.case_names import load_case
from tilewright.records.measurement import Direction, Measurement
from tilewright.records.sources import digest
from tilewright.verbs import explain_case

ROOT = Path(__file__).parents[1]
COPY = 4000.0


def row(suite: str, case: str, impl: str, direction: Direction, us: float, GBps: float | None = None) -> Measurement:
    share = None if GBps is None else GBps / COPY
    return Measurement(suite, case, impl, direction, us, us, us, 9, GBps=GBps, of_ceiling=share)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_hold_the_figures_of_the_result_files(document) -> None:
    text = document.read_text(encoding="utf-8")
    assert rewritten(text, read_all(RESULTS / "h200")) == text, "run python -m benchmarks.tables"


def code_after(words: str) -> str:
    """The block of code in README that follows a line with `words`."""
    _, _, behind = (ROOT / "README.md").read_text(encoding="utf-8").partition(words)
    return behind.split("```")[1].partition("\n")[2]


def test_readme_shows_what_explain_prints_of_a_model() -> None:
    names: dict[str, Any] = {}
    exec(code_after("## Your own model").partition("\n\nprint(")[0], names)
    program = tilewright.explain(names["model"], names["x"], on="h200").program
    shown = " ".join(code_after("`explain` prints, for this model").split())
    said = [f"{d.verdict} {d.producer} → {d.consumer} {d.reason}" for d in program.decisions]
    assert [line for line in said if line in shown] == said[:2]
    captured = [operator for operator in program.operators if operator.stage == "before"]
    assert captured and all(op.name in shown for op in captured if op.operator_class != "layout")


def test_readme_shows_what_explain_prints_of_fusion() -> None:
    case = load_case("examples/naive_softmax.py:softmax", None, training=None)
    printed = str(explain_case(case, "h200")).splitlines()
    shown = code_after("has cases to try:\n").splitlines()[2:]
    assert shown and [line for line in printed if line in shown] == shown


def test_every_table_stands_in_a_document() -> None:
    named = [found["name"] for path in DOCUMENTS for found in TABLE.finditer(path.read_text(encoding="utf-8"))]
    assert sorted(named) == sorted(TABLES)


def test_text_around_a_table_stays() -> None:
    text = "before\n<!-- table: norms -->\nold | figures\n<!-- /table -->\nafter\n"
    rows = [row("rms_norm", "65536x4096 bf16", "tilewright", "fwd", 250.0, 3000.0)]
    rows.append(row("layer_norm", "65536x4096 bf16", "tilewright", "bwd", 500.0, 2000.0))
    rows.append(row("layer_norm", "3x4096 bf16", "tilewright", "fwd", 5.0, 1.0))
    new = rewritten(text, Results(rows))
    assert new.startswith("before\n<!-- table: norms -->\n| columns |") and new.endswith(
        ALL + "<!-- /table -->\nafter\n"
    )
    assert "old | figures" not in new
    assert "| 4096 | – | 0.75 | – | – | 0.50 | – | – | – |\n" in new


def test_figures_of_sources_that_changed_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with copied_sources(tmp_path, monkeypatch, "kernels", "emit", "loops", "schedule") as folder:

        def measured(name: str, impl: str = "tilewright") -> Measurement:
            made_from = suite(name).sources_of(impl)
            made = row(name, "65536x4096 bf16", impl, "fwd", 250.0, 3000.0)
            return replace(made, sources=digest(*made_from) if made_from else "")

        rows = [measured("rms_norm"), measured("rms_norm", "torch"), measured("cross_entropy"), measured("gelu")]
        assert all(map(is_todays, rows)) and is_todays(measured("gelu", "generated"))
        text = "<!-- table: norms -->\n<!-- /table -->\n<!-- table: cross entropy -->\n<!-- /table -->\n"
        assert "†" not in rewritten(text, Results(rows))
        change_a_line(folder / "kernels/norm/moments.cuh")
        assert [is_todays(r) for r in rows] == [False, True, True, True]
        rows.append(replace(rows[0], case="32768x8192 bf16", sources=digest(*suite("rms_norm").sources)))
        both = rewritten(text, Results(rows))
        assert both.count("0.75 †") == both.count(FOOTNOTE) == 1 and both.count("| 0.75 |") == 2
        change_a_line(folder / "kernels/row.cuh")
        assert [is_todays(r) for r in rows] == [False, True, False, True, False]
        assert rewritten(text, Results(rows)).count(ALL) == 2
        (judged,) = (v for v in verdicts(Results(rows)) if v.bar.what == "row kernels forward, of copy")
        assert (judged.rows, judged.old) == (3, 3)


def test_races_that_others_win_are_listed_with_the_package_that_won() -> None:
    rows = [row("softmax", f"65536x{n} bf16", "tilewright", "fwd", 100.0) for n in (1024, 2048)]
    rows += [row("softmax", "65536x1024 bf16", impl, "fwd", us) for impl, us in (("quack", 90.0), ("liger", 98.5))]
    rows += [replace(row("softmax", "65536x2048 bf16", "quack", "fwd", 150.0), package="quack-kernels 0.6.5")]
    rows += [row("softmax", "65536x2048 bf16", "generated", "fwd", 50.0)]
    (line,) = TABLES["second"](Results(rows)).splitlines()[2:]
    assert line == "| `softmax` fwd | quack-kernels 0.6.5 | 1 of 2 | 0.90 † | 65536x1024 bf16 |"


def test_a_row_without_a_digest_is_marked() -> None:
    assert not is_todays(row("softmax", "65536x4096 bf16", "tilewright", "fwd", 250.0))
    assert not is_todays(row("models", "gpt2 B8 bf16", "tilewright", "infer", 250.0))
    assert is_todays(row("models", "gpt2 B8 bf16", "inductor", "infer", 250.0))


def test_every_claim_was_checked_on_each_device() -> None:
    ids = [claim.id for document in documents() for claim in document.claims]
    for device, rows in results().items():
        assert [row.id for row in rows] == ids, device
        assert not [row.id for row in rows if row.verdict == "failed"], device


def test_only_claims_that_need_another_device_are_not_here() -> None:
    claims = {claim.id: claim for document in documents() for claim in document.claims}
    for device, rows in results().items():
        missing = [row.id for row in rows if row.verdict == "not here"]
        other = "cuda" if device == "cpu" else "cpu"
        assert missing == [id_ for id_, claim in claims.items() if claim.needs == other], device


@pytest.mark.parametrize(("document", "words"), [(PAGE, ENGLISH), (CHINESE, chinese())], ids=["en", "zh"])
def test_the_page_is_written_from_the_results(document: Path, words: Language) -> None:
    assert document.read_text(encoding="utf-8") == page(results(), words), "run python -m benchmarks.claims"


def test_every_claim_is_translated() -> None:
    words = chinese()
    assert [claim.id for document in documents() for claim in document.claims] == list(words.claims)
    assert {document.title for document in documents()} == set(words.documents)


def test_rows_hold_the_claims_as_they_are_worded() -> None:
    claims = {claim.id: claim for document in documents() for claim in document.claims}
    for rows in results().values():
        stale = [row.id for row in rows if (row.claim, row.theirs, row.why) != _words(claims[row.id])]
        assert not stale, "measure these again"


def _words(claim) -> tuple[str, str, str]:
    return claim.text, claim.theirs, claim.why


def test_the_printed_order_is_the_checked_one() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    highest_first = [layer.strip("()") for layer in contract["layers"]]
    printed = re.findall(r"^\| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.M)
    assert printed == highest_first[::-1]


def test_every_environment_variable_is_documented() -> None:
    """Those that the package's sources name, and no others."""
    sources = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".cpp", ".cu", ".cuh", ".h")]
    named = {name for path in sources for name in re.findall(r"\bTILEWRIGHT_[A-Z_]+\b", path.read_text("utf-8"))}
    described = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "environment.md").read_text("utf-8"), re.MULTILINE)
    assert set(described) == named and len(described) == len(named) > 5
