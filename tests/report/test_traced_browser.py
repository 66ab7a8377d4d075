"""The trace's part of the page in a browser: it finds, tells, zooms, and trusts no name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.browser import CHROMIUM, Browser
from tests.report.drawings import marks, point_at, signal
from tests.report.test_traced_page import write_hostile_trace
from tests.trace.training_trace import TrainingTrace, load
from tests.waiting import until
from tilewright.report.page import write_page
from tilewright.store import query

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")

TIMELINE = "#timeline-chart"
CANVAS = "#timeline-chart canvas"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    return load(TrainingTrace(3).write(folder / "trace.json"), folder / "run.duckdb")


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    return write_page(run, run.with_suffix(".html"))


@pytest.fixture(scope="module")
def recorded_page(recorded: Path) -> Path:
    return write_page(recorded, recorded.with_suffix(".html"))


def opened(browser: Browser, page: Path, width: int = 1400, height: int = 1000, scheme: str = "light") -> None:
    browser.open(page, width, height, scheme)
    marks(browser, TIMELINE, "rect")
    # Vega asks what is under the pointer when it moves.
    browser.hover(CANVAS)


def slices(browser: Browser, name: str = "") -> list[dict[str, Any]]:
    """The boxes drawn of slices whose name contains `name`."""
    return [mark for mark in marks(browser, TIMELINE, "rect") if name in mark["row"]["name"]]


def seconds(browser: Browser) -> tuple[float, float]:
    """The time in view."""
    begin, end = browser.evaluate(f"document.querySelector('{TIMELINE} > div').view.scale('x').domain()")
    return begin, end


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (420, "dark")])
def test_opens_without_an_error_and_fits(browser: Browser, page: Path, width: int, scheme: str) -> None:
    opened(browser, page, width=width, scheme=scheme)
    assert browser.problems == []
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert {mark["row"]["name"] for mark in marks(browser, TIMELINE, "text")} >= {"GPU 0", "stream 7"}


def test_the_wheel_zooms_about_the_pointer_and_draws_what_is_in_view(browser: Browser, page: Path, run: Path) -> None:
    opened(browser, page)
    before, all_of_them = seconds(browser), len(slices(browser))
    ((count,),) = query(run, "SELECT count(*) FROM slice WHERE name <> '[memory]'")[1]
    assert all_of_them >= int(str(count))
    browser.wheel(CANVAS, -400, ctrl=True)
    until(lambda: seconds(browser) != before)
    begin, end = seconds(browser)
    assert before[0] < begin < end < before[1]
    drawn = slices(browser)
    assert 0 < len(drawn) < all_of_them
    assert all(mark["row"]["end"] >= begin and mark["row"]["begin"] <= end for mark in drawn)
    browser.drag(CANVAS, 60, 0, 5)
    until(lambda: seconds(browser)[0] < begin)


def test_the_wheel_alone_scrolls_the_page(browser: Browser, page: Path) -> None:
    opened(browser, page, height=500)
    before, shown = browser.evaluate("scrollY"), seconds(browser)
    browser.wheel(CANVAS, 60)
    until(lambda: browser.evaluate("scrollY") > before)
    assert seconds(browser) == shown


def test_search_dims_the_others(browser: Browser, page: Path, run: Path) -> None:
    opened(browser, page)
    ((found,),) = query(run, "SELECT count(*) FROM slice WHERE name LIKE '%aten::mul%'")[1]
    signal(browser, TIMELINE, "find", "ATEN::mul")
    lit = [mark["row"]["name"] for mark in slices(browser) if mark["opacity"] > 0.5]
    assert len(lit) == found and all("aten::mul" in name for name in lit)


def test_a_kernel_tells_its_launch_its_operator_and_its_arguments(browser: Browser, page: Path) -> None:
    opened(browser, page)
    told = point_at(browser, TIMELINE, slices(browser, "gemm")[0], click=True)
    for words in ("comes from", "cudaLaunchKernel", "(ac2g)", "launched within", "phase", "[132, 1, 1]"):
        assert words in told, words
    assert len(marks(browser, TIMELINE, "rule")) == 1
    told = point_at(browser, TIMELINE, slices(browser, "cudaLaunchKernel")[0])
    assert "leads to" in told and "train.py(12): step" in told


def test_more_rows_than_a_canvas_has_pixels_are_drawn(browser: Browser, tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "f", "pid": 1, "tid": tid, "ts": depth, "dur": 100 - 2 * depth}
        for tid in range(240)
        for depth in range(20)
    ]
    (tmp_path / "trace.json").write_text(json.dumps(events))
    opened(browser, write_page(load(tmp_path / "trace.json", tmp_path / "run.duckdb"), tmp_path / "run.html"))
    assert browser.problems == [] and len(slices(browser)) == len(events)
    painted = f"document.querySelector('{CANVAS}').getContext('2d').getImageData(300, 200, 200, 200).data"
    assert browser.evaluate(f"new Set(new Uint32Array({painted}.buffer)).size") > 1


def test_the_flame_graphs_tell_their_shares(browser: Browser, page: Path, run: Path) -> None:
    opened(browser, page)
    ((host,),) = query(run, "SELECT sum(dur) FROM slice WHERE parent_id IS NULL AND category <> 'kernel'")[1]
    boxes = marks(browser, "#flame-0", "rect")
    launches = sum(b["row"]["end"] - b["row"]["begin"] for b in boxes if b["row"]["name"] == "cudaLaunchKernel")
    ((launched,),) = query(run, "SELECT sum(dur) FROM slice WHERE name = 'cudaLaunchKernel'")[1]
    assert 1e9 * launches == pytest.approx(float(str(launched)))
    assert 1e9 * boxes[0]["row"]["end"] == pytest.approx(float(str(host)))
    told = point_at(browser, "#flame-0", boxes[3])
    assert boxes[3]["row"]["name"] in told and "of all" in told and "per step" in told


def test_memory_tells_its_peak_and_who_held_it(browser: Browser, page: Path) -> None:
    opened(browser, page)
    made = TrainingTrace(3)
    said = browser.evaluate("document.querySelector('#allocator').innerText")
    assert "This program trains" in said and "before the profile" in said
    rows = browser.evaluate(
        "[...document.querySelectorAll('#allocator tbody tr')].map((row) => row.cells[0].innerText)"
    )
    first = max(made.live, key=lambda key: made.live[key])
    assert len(rows) == len(made.live) and rows[0] == first[0]
    (peak,) = [mark for mark in marks(browser, "#allocator-0", "symbol") if mark["row"]["is_peak"]]
    assert "MB" in point_at(browser, "#allocator-0", peak)


def test_saved_json_holds_the_slices(browser: Browser, page: Path, run: Path) -> None:
    browser.open(page)
    browser.evaluate("URL.createObjectURL = (blob) => { window.saved = blob.text(); return 'data:,'; }")
    browser.click(".perfetto button:nth-of-type(2)")
    events = json.loads(browser.evaluate("saved"))["traceEvents"]
    ((origin,),) = query(run, "SELECT min(ts) FROM slice WHERE name <> '[memory]'")[1]
    rows = query(run, "SELECT name, ts, dur FROM slice WHERE name <> '[memory]' ORDER BY ALL")[1]
    saved = sorted((e["name"], round(e["ts"] * 1e3) + origin, round(e["dur"] * 1e3)) for e in events if e["ph"] == "X")
    assert saved == rows
    ((flows,),) = query(run, "SELECT count(*) FROM flow")[1]
    assert sum(e["ph"] == "s" for e in events) == flows == sum(e["ph"] == "f" for e in events)


def test_perfetto_gets_the_trace_after_its_answer(browser: Browser, page: Path) -> None:
    browser.open(page)
    # A port stands for the tab: it hears what is posted, and a message may name it as its source.
    browser.evaluate(
        """(() => {
          window.heard = [];
          const tab = new MessageChannel().port1;
          tab.postMessage = (message, origin) => {
            heard.push([message === "PING" ? message : new TextDecoder().decode(message.perfetto.buffer), origin]);
            const answer = (origin) =>
              dispatchEvent(new MessageEvent("message", { data: "PONG", origin, source: tab }));
            if (heard.length === 2) answer("https://elsewhere.example");
            if (heard.length === 3) answer("https://ui.perfetto.dev");
          };
          window.open = (url) => { heard.push(["open", url]); return tab; };
        })()"""
    )
    browser.click(".perfetto button:nth-of-type(1)")
    until(lambda: "Opened in a tab" in browser.evaluate("document.querySelector('.perfetto').innerText"))
    heard: list[Any] = browser.evaluate("heard")
    assert heard[0] == ["open", "https://ui.perfetto.dev"]
    assert [message for message, _ in heard[1:-1]] == ["PING"] * (len(heard) - 2)
    assert {origin for _, origin in heard[1:]} == {"https://ui.perfetto.dev"}
    assert json.loads(heard[-1][0])["traceEvents"]


def test_without_a_network_the_page_says_so(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.send("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
    try:
        browser.click(".perfetto button:nth-of-type(1)")
        assert "it needs a network" in browser.evaluate("document.querySelector('.perfetto').innerText")
    finally:
        browser.send(
            "Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )


def test_hostile_names_are_shown_and_not_run(browser: Browser, tmp_path: Path) -> None:
    opened(browser, write_page(write_hostile_trace(tmp_path), tmp_path / "run.html"))
    for mark in slices(browser, "</script>"):
        assert "<img" in point_at(browser, TIMELINE, mark)
    signal(browser, TIMELINE, "find", "'); document.title = 'owned'; ('")
    assert browser.evaluate("document.title") != "owned" and browser.problems == []
    assert browser.evaluate("document.querySelectorAll('img, iframe').length") == 0


@pytest.mark.parametrize("width", [1400, 420])
def test_a_recorded_step_with_every_table(browser: Browser, recorded_page: Path, width: int) -> None:
    browser.open(recorded_page, width=width)
    assert browser.problems == []
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tables = browser.evaluate("[...document.querySelectorAll('section table tbody')].map((body) => body.rows.length)")
    assert len(tables) >= 4 and min(tables) >= 1
    bar = browser.evaluate(
        "[...document.querySelectorAll('.stack.tall span')].map((part) => parseFloat(part.style.width))"
    )
    assert sum(bar) == pytest.approx(100, abs=0.5)


def test_a_gap_tells_its_cause(browser: Browser, recorded_page: Path) -> None:
    opened(browser, recorded_page)
    gap = max(slices(browser, "launch-bound"), key=lambda mark: float(mark["width"]))
    told = point_at(browser, TIMELINE, gap)
    assert "caused by" in told and "within" in told
