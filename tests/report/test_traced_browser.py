"""The trace's part of the page in a browser: it stays smooth, finds, selects, tells, zooms, and trusts no name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.report.browser import CHROMIUM, Browser
from tests.report.test_trace_tables import FIXTURE
from tests.report.test_traced_page import write_hostile_trace
from tests.trace.training_trace import TrainingTrace, load
from tests.waiting import until
from tilewright.report.page import write_page
from tilewright.store import query
from tilewright.trace.analysis import analyse

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")

CANVAS = "canvas.timeline"
SETTLE = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))"
# Frames, and boxes and words in them; the first box of a frame is its paper.
COUNT_PAINTING = """(() => {
  window.painted = { frames: 0, boxes: 0 };
  const pen = CanvasRenderingContext2D.prototype;
  for (const name of ["fillRect", "fillText"]) {
    const paint = pen[name];
    pen[name] = function (...where) {
      painted.boxes += 1;
      const [x, y, width] = where;
      if (name === "fillRect" && x === 0 && y === 0 && width === this.canvas.clientWidth) painted.frames += 1;
      return paint.apply(this, where);
    };
  }
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    return load(TrainingTrace(3).write(folder / "trace.json"), folder / "run.duckdb")


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    return write_page(run, run.with_suffix(".html"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A timeline of 50,000 slices and as many arrows and memory events as go with them."""
    folder = tmp_path_factory.mktemp("large")
    made = TrainingTrace(0, steps=20, operators=120)
    assert sum(event["ph"] == "X" for event in made.events) > 50_000
    return write_page(load(made.write(folder / "trace.json"), folder / "run.duckdb"), folder / "run.html")


def view(browser: Browser) -> tuple[float, float]:
    """The ns at the left and the right edge of the timeline."""
    start, end = browser.evaluate(f"[{CANVAS_JS}.dataset.from, {CANVAS_JS}.dataset.to].map(Number)")
    return start, end


CANVAS_JS = f"document.querySelector('{CANVAS}')"


def find(browser: Browser, words: str, selector: str = "#timeline-search") -> str:
    """Search, and what the page says it found."""
    browser.evaluate(
        f"(() => {{ const box = document.querySelector({json.dumps(selector)}); box.value = {json.dumps(words)};"
        "box.dispatchEvent(new Event('input')); })()"
    )
    browser.evaluate(SETTLE)
    found = browser.evaluate(f"document.querySelector({json.dumps(selector)}).parentNode.innerText")
    assert isinstance(found, str)
    return found.strip()


def details(browser: Browser) -> str:
    found = browser.evaluate("document.querySelector('.details').innerText")
    assert isinstance(found, str)
    return found


def select(browser: Browser, words: str) -> str:
    find(browser, words)
    browser.evaluate("document.querySelector('#timeline-search').focus()")
    browser.press("Enter")
    return details(browser)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 420])
def test_opens_without_an_error_and_fits(browser: Browser, page: Path, width: int, scheme: str) -> None:
    browser.open(page, width=width, scheme=scheme)
    assert browser.problems == []
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    browser.evaluate(SETTLE)
    # More than the paper was painted.
    colours = browser.evaluate(
        f"new Set(new Uint32Array({CANVAS_JS}.getContext('2d').getImageData(0, 0, {CANVAS_JS}.width, "
        f"{CANVAS_JS}.height).data.buffer)).size"
    )
    assert colours > 6


def test_fifty_thousand_slices_cost_no_more_than_the_pixels_they_share(browser: Browser, large: Path) -> None:
    browser.open(large)
    assert browser.problems == []
    browser.evaluate(f"{CANVAS_JS}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    browser.evaluate(COUNT_PAINTING)
    gestures = {
        "zoom in": lambda: [browser.wheel(CANVAS, -60, ctrl=True) for _ in range(30)],
        "zoom out": lambda: [browser.wheel(CANVAS, 60, ctrl=True) for _ in range(30)],
        "move": lambda: [browser.wheel(CANVAS, 40, shift=True) for _ in range(30)],
        "drag": lambda: browser.drag(CANVAS, 400, 40, 60),
    }
    for name, gesture in gestures.items():
        before = view(browser)
        browser.evaluate("painted.frames = painted.boxes = 0")
        if name == "move":
            browser.wheel(CANVAS, -600, ctrl=True)
        gesture()
        browser.evaluate(SETTLE)
        frames, boxes = browser.evaluate("[painted.frames, painted.boxes]")
        # A frame an event at the most, and less than a tenth of the slices in it.
        assert view(browser) != before and 0 < frames <= 61 and boxes < 5_000 * frames, name


def test_the_wheel_zooms_about_the_pointer_and_moves(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.evaluate(f"{CANVAS_JS}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    start, end = view(browser)
    browser.wheel(CANVAS, -400, ctrl=True)
    browser.evaluate(SETTLE)
    left, right = view(browser)
    assert start < left < right < end and (right - left) < 0.5 * (end - start)
    browser.wheel(CANVAS, 100, shift=True)
    browser.evaluate(SETTLE)
    moved = view(browser)
    assert moved[0] > left and moved[1] - moved[0] == pytest.approx(right - left)
    browser.drag(CANVAS, 100, 0, 5)
    browser.evaluate(SETTLE)
    assert view(browser)[0] < moved[0]


def test_the_wheel_alone_scrolls_the_page(browser: Browser, page: Path) -> None:
    browser.open(page, height=500)
    browser.evaluate(f"{CANVAS_JS}.scrollIntoView({{block: 'start', behavior: 'instant'}})")
    before, shown = browser.evaluate("scrollY"), view(browser)
    browser.wheel(CANVAS, 60)
    until(lambda: browser.evaluate("scrollY") > before)
    assert view(browser) == shown


def test_keys_zoom_move_and_select(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.evaluate(f"{CANVAS_JS}.focus()")
    spans = [view(browser)]
    for key in ("w", "w", "d", "a", "s", "Home"):
        browser.press(key)
        browser.evaluate(SETTLE)
        spans.append(view(browser))
    width = [end - start for start, end in spans]
    assert width[2] < width[1] < width[0] and spans[3][0] > spans[2][0] > spans[4][0] - 1 and width[5] > width[4]
    assert width[6] == pytest.approx(width[0])
    browser.press("ArrowDown")
    first = details(browser)
    browser.press("ArrowRight")
    assert "duration" in first and details(browser) != first
    browser.press("f")
    browser.evaluate(SETTLE)
    assert view(browser)[1] - view(browser)[0] < width[0]
    browser.press("Escape")
    assert "slices over" in details(browser)


def test_search_counts_what_the_run_holds(browser: Browser, page: Path, run: Path) -> None:
    browser.open(page)
    ((slices, _),) = query(run, "SELECT count(*), sum(dur) FROM slice WHERE name = 'aten::mul'")[1]
    assert find(browser, "aten::mul").startswith(f"{slices} slices, ")
    assert find(browser, "train.py(12)").startswith("0 slices")
    browser.click("#timeline-python")
    assert find(browser, "train.py(12)").startswith("6 slices")
    assert find(browser, "no such slice").startswith("0 slices")


def test_a_kernel_tells_its_launch_its_operator_and_its_arguments(browser: Browser, page: Path) -> None:
    browser.open(page)
    told = select(browser, "gemm")
    for words in (
        "GPU 0, stream 7",
        "comes from",
        "cudaLaunchKernel",
        "(ac2g)",
        "phase",
        "train.py(12): step",
        "[132, 1, 1]",
    ):
        assert words in told, words
    browser.click(".details button.more")
    assert details(browser).startswith("cudaLaunchKernel") and "leads to" in details(browser)


def test_an_operator_tells_what_it_launched(browser: Browser, page: Path, run: Path) -> None:
    browser.open(page)
    told = select(browser, "ProfilerStep")
    assert "pieces of work" in told and "on the device" in told
    ((dur,),) = query(run, "SELECT sum(dur) / 1e3 FROM slice WHERE category = 'kernel'")[1]
    assert isinstance(dur, float)
    assert "slice id" in told


def test_a_click_selects_and_folds(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.click(CANVAS)
    height = browser.evaluate(f"{CANVAS_JS}.height")
    # The name of the first track: below the ranges, the heading and the memory of the GPU, and its own heading.
    box = browser.evaluate(f"{CANVAS_JS}.getBoundingClientRect().toJSON()")
    for kind in ("mousePressed", "mouseReleased"):
        place = {"x": box["x"] + 40, "y": box["y"] + 26 + 32 + 4 + 24 + 46 + 24 + 10}
        browser.send("Input.dispatchMouseEvent", type=kind, **place, button="left", clickCount=1)
    browser.evaluate(SETTLE)
    assert browser.evaluate(f"{CANVAS_JS}.height") < height


def test_the_flame_graph_zooms_and_searches(browser: Browser, page: Path, run: Path) -> None:
    browser.open(page)
    assert "Device time" in browser.evaluate("document.querySelector('#flame-controls [aria-pressed=true]').innerText")
    browser.click("#flame-controls button:first-child")
    widths = "[...document.querySelectorAll('svg.flame .frame rect')].map((box) => Number(box.getAttribute('width')))"
    before = browser.evaluate(widths)
    browser.click("#flame-chart .frame:nth-of-type(6)")
    after = browser.evaluate(widths)
    full = browser.evaluate("document.querySelector('svg.flame').clientWidth")
    assert sum(width > full - 2 for width in after) > sum(width > full - 2 for width in before)
    browser.evaluate("document.querySelector('svg.flame').dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
    assert browser.evaluate(widths) == before
    ((share,),) = query(
        run,
        "SELECT 100.0 * sum(dur) / (SELECT sum(dur) FROM slice WHERE parent_id IS NULL AND category <> 'kernel')"
        " FROM slice WHERE name = 'cudaLaunchKernel'",
    )[1]
    assert f"{share:.1f} % of all" in find(browser, "cudaLaunchKernel", "#flame-search")
    assert browser.evaluate("document.querySelectorAll('svg.flame .hit').length") > 0
    browser.hover("#flame-chart .frame:nth-of-type(4)")
    assert "of all" in browser.evaluate("document.getElementById('tip').innerText")


def test_memory_tells_its_peak_and_who_held_it(browser: Browser, page: Path) -> None:
    browser.open(page)
    made = TrainingTrace(3)
    said = browser.evaluate("document.querySelector('#allocator').innerText")
    assert "This program trains" in said and "before the profile" in said
    rows = browser.evaluate(
        "[...document.querySelectorAll('#allocator tbody tr')].map((row) => row.cells[0].innerText)"
    )
    first = max(made.live, key=lambda key: made.live[key])
    assert len(rows) == len(made.live) and rows[0] == first[0]
    browser.hover("#allocator-chart svg")
    assert "of the peak" in browser.evaluate("document.getElementById('tip').innerText")


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
    browser.open(write_page(write_hostile_trace(tmp_path), tmp_path / "run.html"))
    assert browser.problems == []
    for words in ("<img", "</script>"):
        assert f"{words}" in select(browser, words)
    browser.click("#timeline-python")
    browser.hover("#flame-chart .frame:nth-of-type(3)")
    assert browser.evaluate("document.title") != "owned" and browser.problems == []
    assert browser.evaluate("document.querySelectorAll('img, iframe').length") == 0


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three training steps of a Transformer block as an H200 ran them, with every analysis."""
    path = load(FIXTURE, tmp_path_factory.mktemp("recorded") / "run.duckdb")
    with duckdb.connect(str(path)) as connection:
        analyse(connection)
    return path


@pytest.mark.parametrize("width", [1400, 420])
def test_a_recorded_step_with_every_table(browser: Browser, recorded: Path, width: int) -> None:
    browser.open(write_page(recorded, recorded.with_suffix(".html")), width=width)
    assert browser.problems == []
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tables = browser.evaluate("[...document.querySelectorAll('section table tbody')].map((body) => body.rows.length)")
    assert len(tables) >= 4 and min(tables) >= 1
    bar = browser.evaluate(
        "[...document.querySelectorAll('.stack.tall span')].map((part) => parseFloat(part.style.width))"
    )
    assert sum(bar) == pytest.approx(100, abs=0.5)


def test_a_gap_tells_its_cause(browser: Browser, recorded: Path) -> None:
    browser.open(write_page(recorded, recorded.with_suffix(".html")))
    told = select(browser, "launch-bound")
    assert "where its time went" in told and "caused by" in told
    browser.click(".details button.more")
    assert "kernel" in details(browser) and "launched within" in details(browser)
