"""The page holds what the run holds, is one file without a network, and is deaf to hostile text."""

import functools
import json
import re
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.report.large import write_large
from tests.report.sample import CEILINGS, measurements, program, verified, write_sample
from tilewright.records.errors import StoreError
from tilewright.records.measurement import Ceiling, Measurement, Verified
from tilewright.records.program import Cost, Decision, Fallback, MemoryPoint, Operator, Program, Region
from tilewright.report.charts import roofline
from tilewright.report.page import prose, write_page
from tilewright.report.queries import DRAWN, MOST_ROWS
from tilewright.report.views import PROGRAM
from tilewright.store import Run, query

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&{{7*7}}\u2028\x00"
Row = TypeVar("Row", Operator, Region, Decision, MemoryPoint, Fallback, Measurement, Ceiling, Verified, Cost)


class Elements(HTMLParser):
    """Start tags with their attributes, and the text within each kind of element."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open, []).append(data)


def poisoned(row: Row, text: str) -> Row:
    """`row` with `text` in every field that is free text."""
    free = {
        "name", "target", "dtype", "bound", "region", "source", "source_code", "producer", "consumer", "reason",
        "passed_by", "what", "where", "why", "suite", "case", "device", "kind", "tensor", "shape_symbolic",
        "reads_symbolic", "writes_symbolic", "unused_symbolic", "flops_symbolic",
    }  # fmt: skip
    changes: dict[str, Any] = {
        field.name: text
        for field in fields(row)
        if field.name in free and isinstance(getattr(row, field.name), str | None)
    }
    if hasattr(row, "cost"):
        changes["cost"] = poisoned(row.cost, text)
    return replace(row, **changes)


def write_hostile(path: Path, text: str = HOSTILE) -> Path:
    """The sample with every free text replaced by `text`."""
    block = program()
    poison = Program(
        [poisoned(row, text) for row in block.operators[:3]],
        [replace(poisoned(row, text), members=(text,)) for row in block.regions[:2]],
        [poisoned(row, text) for row in block.decisions[:3]],
        [poisoned(row, text) for row in block.memory[:3]],
        [poisoned(row, text) for row in block.fallbacks],
    )
    with Run.create(path, command=text, target=text, case=text, dims={text: 1}, machine={text: text}) as run:
        run.add_program(poison)
        run.add([poisoned(row, text) for row in CEILINGS])
        run.add([poisoned(row, text) for row in measurements()])
        run.add([poisoned(row, text) for row in verified()])
    return path


@functools.cache
def page_of(run: Path) -> str:
    """The page of a run that is complete: it is written once, beside the run."""
    return write_page(run, run.with_suffix(".html")).read_text("utf-8")


def island(html: str, name: str = "run-data") -> dict[str, Any]:
    """The data in a page: `run-data` of the program, `trace-data` of a trace."""
    match = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', html, re.DOTALL)
    assert match
    data: dict[str, Any] = json.loads(match[1])
    return data


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("sample") / "run.duckdb")


def test_the_page_holds_what_the_run_holds(sample: Path) -> None:
    data = island(page_of(sample))
    queries = DRAWN | {view.id: view.sql for view in PROGRAM}
    assert set(data) == set(queries)
    for name, sql in queries.items():
        columns, rows = query(sample, sql)
        assert data[name]["columns"] == list(columns)
        assert data[name]["rows"] == json.loads(json.dumps(rows)), name
        assert data[name]["total"] == len(rows)
    assert len(data["operators"]["rows"]) == len(program().operators)


def test_headlines_come_from_the_run(sample: Path) -> None:
    html = page_of(sample)
    for figure, meaning in (
        ("1.83×", "speed of eager, fwd+bwd"),
        ("1.17×", "speed of Inductor, fwd+bwd"),
        ("−74 %", "bytes moved"),
        ("24 → 14", "kernel launches"),
        ("18 of 18", "tensors within the numbers contract"),
    ):
        assert f"<b>{figure}</b><span>{meaning}</span>" in html


def test_nothing_is_fetched(sample: Path) -> None:
    elements = Elements(page_of(sample))
    for tag, attributes in elements.tags:
        assert tag not in ("img", "iframe", "object", "base", "form"), tag
        assert "src" not in attributes
        if "href" in attributes:
            assert str(attributes["href"]).startswith(("#", "data:"))
    (policy,) = [attrs["content"] for tag, attrs in elements.tags if attrs.get("http-equiv")]
    assert policy is not None and policy.startswith("default-src 'none'") and "unsafe" not in policy


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    harmless = Elements(page_of(write_hostile(tmp_path / "harmless.duckdb", "harmless")))
    html = page_of(write_hostile(tmp_path / "hostile.duckdb"))
    hostile = Elements(html)
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in harmless.tags]
    assert "<script>document" not in html and "<img src=x" not in html and "49" not in hostile.texts["h1"][0]
    assert island(html)["memory"]["rows"][0][3] == HOSTILE


def test_code_in_a_sentence_is_code() -> None:
    assert prose("`a < b` fits it; `c` and d's") == ("<code>a &lt; b</code> fits it; <code>c</code> and d&#39;s")


def test_a_page_says_what_it_leaves_out(tmp_path: Path) -> None:
    html = page_of(write_large(tmp_path / "run.duckdb", 6000))
    assert len(html.encode()) <= 5_000_000
    assert len(island(html)["operators"]["rows"]) == MOST_ROWS
    assert "The first 4,000 of 8,000 rows" in html


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run.duckdb", command="c", target="t", case="nothing"):
        pass
    html = page_of(tmp_path / "run.duckdb")
    assert "not verified" in html and 'id="decisions"' not in html


def test_a_page_that_cannot_be_written(sample: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write the page .*File exists|Not a directory"):
        write_page(sample, tmp_path / "file" / "page.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="cannot write the page"):
        write_page(sample, tmp_path / "folder")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "folder"]
    assert write_page(sample, tmp_path / "new" / "folder" / "page.html").exists()


def test_a_page_needs_no_cache(sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file" / "cache"))
    assert "vegaEmbed" in write_page(sample, tmp_path / "page.html").read_text("utf-8")


def test_a_missing_run_has_no_page(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no run at"):
        write_page(tmp_path / "missing.duckdb", tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_the_roofs_are_labelled_in_units_that_suit_them() -> None:
    point = {"intensity": 4.0, "TFLOPs": 0.001, "shown": "after fusion", "operator_class": "pointwise"}
    kinds = (
        ("copy", "", 12.3456, "GB/s"),
        ("matmul", "float32", 0.002, "TFLOP/s"),
        ("matmul", "bfloat16", 3.0, "TFLOP/s"),
    )
    ceilings = [
        dict(zip(("kind", "dtype", "value", "unit"), one, strict=True)) | {"origin": "measured"} for one in kinds
    ]
    drawn = json.dumps(roofline([point], ceilings))
    named = set(re.findall(r'"name": "([^"]*FLOP/s|[^"]*B/s)"', drawn))
    assert named == {"memory, copied 12.35 GB/s", "matmul float32 2 GFLOP/s", "matmul bfloat16 3 TFLOP/s"}
