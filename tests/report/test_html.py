"""Results in a notebook: HTML that is well-formed, without control characters, whatever names the program has."""

import json
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.report.sample import CEILINGS, DIMS, measurements, program, write_sample
from tilewright.records.program import Program
from tilewright.report.bench_table import show_race
from tilewright.report.displayable import Displayable
from tilewright.report.html import as_html, framed
from tilewright.report.optimised import show_optimize
from tilewright.report.terminal import show_explain
from tilewright.verbs.questions import sql

HOSTILE = '<script>alert(1)</script>[bold red]x[/]\x1b[2J\x1b[31m\r\x07"&'


class Reader(HTMLParser):
    """Checks that elements are closed in order, and keeps their names and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.names.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert not reader.open and "script" not in reader.names
    assert not {"\x1b", "\r", "\x07"} & set(html)
    return reader


def views(run: Path) -> Iterator[object]:
    yield show_explain(program(), CEILINGS, DIMS)
    yield show_optimize(run, 5)
    yield show_race("title", measurements(), ["a remark"], "GB/s")


def test_every_view_is_tables(tmp_path: Path) -> None:
    for view in views(write_sample(tmp_path / "run.duckdb")):
        assert {"table", "th", "td"} <= read(as_html(view)).names
        assert "<pre>" not in as_html(view)


def test_names_stay_text() -> None:
    operator = replace(program().operators[0], name=HOSTILE, source=HOSTILE, shape_symbolic=HOSTILE)
    html = as_html(show_explain(Program([operator]), [], {HOSTILE: 1}), Path("/a&b<c>.html"))
    (row,) = [row for row in read(html).rows if any("alert" in cell for cell in row)]
    assert row[1].startswith("<script>alert(1)</script>[bold red]x[/]\ufffd[2J")
    assert 'href="file:///a%26b%3Cc%3E.html"' in html or 'href="file:///a&amp;b' in html


def test_rows_of_a_query(tmp_path: Path) -> None:
    run = write_sample(tmp_path / "run.duckdb")
    found = sql("SELECT 1 AS one, 'a<b' AS text, NULL AS nothing UNION ALL SELECT 2, 'c', 'd'", run)
    assert read(found._repr_html_()).rows == [["one", "text", "nothing"], ["1", "a<b", "NULL"], ["2", "c", "d"]]
    assert [row[0] for row in found] == [1, 2] and "a<b" in str(found)


def test_text_has_no_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's kernel sets FORCE_COLOR, and its standard output says that it is a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")

    class Shown(Displayable):
        def __rich__(self) -> object:
            return show_explain(program(), CEILINGS, DIMS)

    assert "before fusion" in str(Shown()) and "\x1b" not in repr(Shown())


def test_a_page_in_a_frame_cannot_reach_the_notebook(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<script>parent.alert("x")</script>')
    (tag,) = [framed(page)[: framed(page).index(" srcdoc")]]
    assert 'sandbox="allow-scripts"' in tag and "<script>" not in framed(page)
    assert read(framed(page)).names == {"iframe"}


CELLS = [
    "import torch, tilewright; x = torch.ones(8, 4)",
    "tilewright.explain(lambda x: x.exp().sum(-1), x, on='cpu')",
    "tilewright.benchmark({'double': lambda x: x + x}, x, seconds=0.05)",
    "with tilewright.profile() as run:\n    x.exp()\nrun",
    "run.frame()",
    "tilewright.sql(\"SELECT name FROM slice WHERE name = 'aten::exp'\")",
    "print(run)",
]


def test_a_kernel_shows_tables(home: Path) -> None:
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    nbclient, nbformat = (pytest.importorskip(name, reason=f"needs {name}") for name in ("nbclient", "nbformat"))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [cell.outputs for cell in notebook.cells]
    for shown in outputs[1:6]:
        (data,) = [output.data for output in shown if output.output_type == "execute_result"]
        assert read(data["text/html"]).names & {"table", "iframe"}
    assert "aten::exp" in outputs[6][0].text and "\x1b" not in json.dumps(outputs)
