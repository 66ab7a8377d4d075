"""The page that steps through a kernel's tiles: what it holds, and what it draws in a browser."""

import json
import re
from pathlib import Path

import pytest

from tests.report.browser import CHROMIUM, Browser
from tilewright.hardware.geometry import Alternative, KernelView, view_of
from tilewright.records.launch_record import Access, LaunchRecord, Operand, ProgramAccesses
from tilewright.report.tile_replay import write_replay

ROWS, COLUMNS, HIGH, WIDE = 8, 64, 2, 16
SOURCE = "@triton.jit\ndef scale(x, y):\n    v = tl.load(x)\n    tl.store(y, '</script>')\n"


def tile(operand: str, row: int, column: int) -> Access:
    """The tile of HIGH × WIDE at `row` and `column`, of a row-major operand."""
    ends = (row * COLUMNS + column, (row + HIGH - 1) * COLUMNS + column + WIDE - 1)
    ranges = ((row, row + HIGH - 1), (column, column + WIDE - 1))
    direction, line = ("read", 3) if operand == "x" else ("write", 4)
    return Access(operand, direction, ranges, HIGH * WIDE, HIGH * WIDE, (HIGH, WIDE), ends, line)  # type: ignore[arg-type]


def view() -> KernelView:
    operands = tuple(Operand(name, "bfloat16", (ROWS, COLUMNS), (COLUMNS, 1)) for name in "xy")
    launch = LaunchRecord("scale", "triton", "scale.py:1", (ROWS // HIGH, 1, 1), 128, "9.0", 32, 0, 0, operands)
    launch = LaunchRecord(**{**vars(launch), "source": SOURCE})
    walks = tuple(
        ProgramAccesses((p, 0, 0), tuple(tile(o, HIGH * p, c) for c in range(0, COLUMNS, WIDE) for o in "xy"))
        for p in (0, 3)
    )
    made = view_of(launch, "h200", 132)
    other = Alternative({"WIDE": 8}, None, refused="it does not compile")
    return KernelView(launch, "h200", None, made.occupancy, made.waves, "⌈8 / HIGH 2⌉", walks, (other,))


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return write_replay([("scale 8x64", [view()])], tmp_path / "deep" / "replay.html")


def test_the_page_holds_each_tile_and_its_bytes(page: Path) -> None:
    (kernel,) = json.loads(re.search(r'id="kernels">(.*?)</script>', page.read_text("utf-8"), re.S)[1])  # type: ignore[index]
    assert kernel["source"] == SOURCE.rstrip().split("\n")
    last = kernel["programs"][1]["steps"][-1]
    assert (last["operand"], last["box"], last["bytes"]) == ("y", [6, 7, 48, 63], 2 * HIGH * WIDE)
    assert last["offsets"] == [6 * COLUMNS + 48, ROWS * COLUMNS - 1]
    assert sum(step["bytes"] for step in kernel["programs"][0]["steps"]) == 2 * 2 * HIGH * COLUMNS
    assert kernel["tiles"][0]["measured_us"] is None and kernel["tiles"][1] == {
        "change": "WIDE 8",
        "refused": "it does not compile",
    }


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (800, "dark")])
def test_steps_move_the_tile_and_the_line(browser: Browser, page: Path, width: int, scheme: str) -> None:
    browser.open(page, width=width, scheme=scheme)
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth") and browser.problems == []
    for _ in range(3):
        browser.click("[aria-label='one step on']")
    assert browser.evaluate("document.querySelector('pre .now').textContent") == "    tl.store(y, '</script>')"
    drawn = browser.evaluate(
        "(({x, width}) => [x.baseVal.value, width.baseVal.value])(document.querySelector('.write'))"
    )
    assert drawn == [1000 * WIDE / COLUMNS, 1000 * WIDE / COLUMNS]
    said = browser.evaluate("document.querySelector('.said').textContent")
    assert said == (
        "Step 4 of 8 writes y[0–1, 16–31], a block of 2×16: 64 B, elements 16 to 95 of its memory. "
        "So far 128 B read, 128 B written."
    )
    assert browser.evaluate("document.querySelectorAll('.earlier').length") == 3 and browser.problems == []
