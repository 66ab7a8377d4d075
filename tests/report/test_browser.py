"""The page in a browser: no error, sorting, filtering, hovering, by mouse and by keyboard."""

from itertools import combinations
from pathlib import Path

import pytest

from tests.report import sample as sample_run
from tests.report.browser import CHROMIUM, Browser
from tests.report.drawings import marks, point_at
from tests.report.large import write_large
from tests.report.sample import program, write_sample
from tests.report.test_optimised_findings import write_lost
from tests.report.test_page import HOSTILE, write_hostile
from tests.waiting import until
from tilewright.records.measurement import Ceiling
from tilewright.report.page import write_page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")

BEFORE = [op for op in program().operators if op.stage == "before"]
COLUMN = "[...document.querySelectorAll('#operators tbody tr')].map((row) => row.cells[{}]?.firstChild.textContent)"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    return write_page(write_sample(folder / "run.duckdb"), folder / "run.html")


def text(browser: Browser, selector: str) -> str:
    found = browser.evaluate(f"document.querySelector({selector!r}).innerText")
    assert isinstance(found, str)
    return found


def squares(browser: Browser) -> int:
    """Fused regions on the roofline."""
    return sum(mark["shape"] == "square" for mark in marks(browser, "#roofline-chart", "symbol"))


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (900, "dark"), (420, "light")])
def test_opens_without_an_error_and_fits(browser: Browser, sample: Path, width: int, scheme: str) -> None:
    browser.open(sample, width=width, scheme=scheme)
    assert browser.problems == []
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert len(marks(browser, "#roofline-chart", "symbol")) > 10
    for stage in ("before", "after"):
        drawn = [op.name for op in program().operators if (op.graph, op.stage) == ("forward", stage)]
        assert [mark["row"]["name"] for mark in marks(browser, f"#graph-{stage}", "symbol")] == drawn
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(20, 23, 26)") == (scheme == "dark")


def test_a_narrow_window_cuts_no_table_and_no_heading_off(browser: Browser, sample: Path, tmp_path: Path) -> None:
    cut = "[...document.querySelectorAll('nav, .sheet')].filter((e) => e.scrollWidth > e.clientWidth).length"
    shown = "[...document.querySelectorAll('#operators th')].filter((e) => e.clientWidth).map((e) => e.innerText)"
    browser.open(sample, width=800)
    assert browser.evaluate(cut) == 0
    assert browser.evaluate(shown) == ["operator", "shape", "reads", "writes", "FLOPs", "floor", "measured"]
    assert text(browser, "#operators .left-out") == "A wider window shows #, class, graph, FLOP/B, source too."
    browser.open(sample)
    assert len(browser.evaluate(shown)) == 12
    browser.open(write_page(write_lost(tmp_path / "lost.duckdb"), tmp_path / "lost.html"), width=800)
    assert "why" in text(browser, "[data-view=lost] thead") and browser.evaluate(cut) == 0


def test_a_header_sorts_down_then_up(browser: Browser, sample: Path) -> None:
    browser.open(sample)
    header = "#operators th:nth-child(10)"
    assert text(browser, header) == "floor"
    slowest_first = [op.name for op in sorted(BEFORE, key=lambda op: -(op.floor_us or 0))]
    browser.click(f"{header} button")
    assert browser.evaluate(COLUMN.format(1)) == slowest_first
    assert browser.evaluate(f"document.querySelector('{header}').getAttribute('aria-sort')") == "descending"
    browser.click(f"{header} button")
    floors = [op.floor_us for op in BEFORE]
    names = browser.evaluate(COLUMN.format(1))
    assert [{op.name: op.floor_us for op in BEFORE}[name] for name in names] == sorted(floors)  # type: ignore[type-var]
    assert browser.evaluate(f"document.querySelector('{header}').getAttribute('aria-sort')") == "ascending"


def choose(browser: Browser, selector: str, value: str) -> None:
    """Pick from a list or type a value, as a user would."""
    browser.evaluate(
        f"(() => {{ const field = document.querySelector({selector!r}); field.value = {value!r};"
        "for (const kind of ['input', 'change']) field.dispatchEvent(new Event(kind)); })()"
    )


def test_tables_filter_by_text_and_class(browser: Browser, sample: Path) -> None:
    browser.open(sample)
    browser.write("#operators input[type=search]", "softmax")
    names = browser.evaluate(COLUMN.format(1))
    assert "softmax" in names and len(names) < len(BEFORE)
    browser.write("#operators input[type=search]", "no such operator")
    assert text(browser, "#operators tbody") == "No row matches."
    choose(browser, "#operators input[type=search]", "ATTENTION")
    choose(browser, "#operators select[data-key=class]", "compute")
    wanted = [op.name for op in BEFORE if "attention" in (op.region or "") and op.operator_class == "compute"]
    assert browser.evaluate(COLUMN.format(1)) == wanted
    assert text(browser, "#operators .tally") == f"{len(wanted)} of {len(program().operators)} rows"
    choose(browser, "#decisions select[data-key=verdict]", "tried and lost")
    lost = [decision for decision in program().decisions if decision.verdict == "tried and lost"]
    verdicts = "[...document.querySelectorAll('#decisions tbody tr')].map((row) => row.cells[0].innerText)"
    assert browser.evaluate(verdicts) == ["tried and lost"] * len(lost)


def test_hovering_an_operator_of_the_graph_tells_its_cost(browser: Browser, sample: Path) -> None:
    browser.open(sample)
    assert browser.evaluate("document.getElementById('tip').hidden")
    (mark,) = [mark for mark in marks(browser, "#graph-before", "symbol") if mark["row"]["name"] == "softmax"]
    tip = point_at(browser, "#graph-before", mark)
    softmax = next(op for op in BEFORE if op.name == "softmax")
    assert "softmax" in tip and "[B, H, S, S] float32" in tip and "B·H·S² = 8.39 M" in tip
    assert softmax.source is not None and softmax.source in tip
    browser.hover("h1")
    assert browser.evaluate("document.getElementById('tip').hidden")


def test_a_band_is_a_region(browser: Browser, sample: Path) -> None:
    browser.open(sample)
    bands = {mark["row"]["name"]: mark["row"]["region"] for mark in marks(browser, "#graph-before", "rect")}
    assert bands == {op.name: op.region for op in BEFORE if op.graph == "forward"}


@pytest.mark.parametrize(
    ("chart", "words"),
    [("#roofline-chart", ("intensity", "measured", "floor", "bound")), ("#memory-chart", ("live bytes", " MB"))],
)
def test_a_mark_of_a_chart_tells_its_figures(browser: Browser, sample: Path, chart: str, words: tuple[str]) -> None:
    browser.open(sample)
    mark = marks(browser, chart, "symbol")[-1]
    tip = point_at(browser, chart, mark)
    assert mark["row"]["name"] in tip and all(word in tip for word in words)


def test_names_of_ceilings_do_not_overlap(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU bf16 products and multiply-adds reach nearly what fp32 products do."""
    rates = {("matmul", "float32"): 0.148, ("matmul", "bfloat16"): 0.151, ("vector", "float32"): 0.148}
    bandwidths = {"copy": 11.4, "cache": 13.0}
    monkeypatch.setattr(
        sample_run,
        "CEILINGS",
        [Ceiling("CPU", kind, dtype, rate, "TFLOP/s", "measured") for (kind, dtype), rate in rates.items()]
        + [Ceiling("CPU", kind, "", rate, "GB/s", "measured") for kind, rate in bandwidths.items()],
    )
    browser.open(write_page(write_sample(tmp_path / "run.duckdb"), tmp_path / "run.html"), width=900)
    labels = marks(browser, "#roofline-chart", "text")
    assert len(labels) == len(rates) + len(bandwidths)
    for one, other in combinations(labels, 2):
        assert abs(one["y"] - other["y"]) > 10 or abs(one["x"] - other["x"]) > (one["width"] + other["width"]) / 2


def test_the_keyboard_shows_where_it_is(browser: Browser, sample: Path) -> None:
    browser.open(sample)
    browser.press("Tab")
    browser.evaluate("document.querySelector('#operators th:nth-child(2) button').focus()")
    assert browser.evaluate("document.activeElement.matches(':focus-visible')")


def test_switches_between_graphs_and_stages(browser: Browser, sample: Path) -> None:
    browser.open(sample)
    browser.click("#graph-pick button:nth-child(2)")
    assert "dropout_add_bwd" in [mark["row"]["name"] for mark in marks(browser, "#graph-after", "symbol")]
    assert squares(browser) >= sum(region.graph == "backward" for region in program().regions)
    browser.click("#roofline-chart input[type=radio]")
    until(lambda: squares(browser) == 0)
    assert browser.problems == []


def test_hostile_text_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    browser.open(write_page(write_hostile(tmp_path / "run.duckdb"), tmp_path / "run.html"))
    assert browser.problems == []
    title = HOSTILE.replace("\u2028", " ").replace("\x00", "\ufffd")
    assert browser.evaluate("document.title").startswith(title[:60])
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert "<img src=x" in point_at(browser, "#graph-before", marks(browser, "#graph-before", "symbol")[0])
    assert browser.evaluate("document.querySelectorAll('script').length") == 5


def test_two_thousand_operators(browser: Browser, tmp_path: Path) -> None:
    browser.open(write_page(write_large(tmp_path / "run.duckdb", 2000), tmp_path / "run.html"))
    assert browser.problems == []
    rows = "document.querySelectorAll('#operators tbody tr').length"
    assert browser.evaluate(rows) == 400 + 1
    browser.click("#operators th:first-child button")
    assert browser.evaluate(COLUMN.format(1))[0] == "operator_1999"
    browser.evaluate("document.querySelector('#operators button.more').click()")
    assert browser.evaluate(rows) == 2000
