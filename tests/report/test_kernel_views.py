"""A launch drawn: operands of one, two and more axes, masks, repeats and scattered accesses."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.report.browser import CHROMIUM, Browser
from tilewright.hardware.geometry import Alternative, KernelView, view_of
from tilewright.records.launch_record import Access, LaunchRecord, Operand, ProgramAccesses, Range
from tilewright.report.geometry import draw
from tilewright.report.tile_replay import write_replay


def launch(grid: tuple[int, int, int], *operands: Operand) -> LaunchRecord:
    return LaunchRecord("kernel", "triton", "file.py:1", grid, 128, "9.0", 32, 0, 0, operands)


def operand(name: str, *shape: int) -> Operand:
    return Operand(name, "float32", shape, tuple([1] * len(shape)))


def read(name: str, *ranges: Range, lanes: int | None = None) -> Access:
    volume = 1
    for first, last in ranges:
        volume *= last - first + 1
    sizes = tuple(last - first + 1 for first, last in ranges)
    return Access(name, "read", ranges, volume, lanes or volume, sizes)


def drawn(walks: Sequence[ProgramAccesses], of: LaunchRecord) -> list[str]:
    return [line.rstrip() for line in draw(walks, of).splitlines()]


def test_one_axis_is_told_and_not_drawn() -> None:
    walks = [
        ProgramAccesses((0, 0, 0), (read("x", (0, 127)),)),
        ProgramAccesses((1, 0, 0), (read("x", (128, 199), lanes=128),)),
    ]
    assert drawn(walks, launch((2, 1, 1), operand("x", 200))) == [
        "each walks 1 tile; program 0",
        "  reads x[0–127] in 1 tile of 128",
    ]


def test_a_row_read_twice_says_so() -> None:
    tiles = [read("x", (0, 0), (start, start + 63)) for start in (0, 64)]
    (_, line, *rest) = drawn([ProgramAccesses((0, 0, 0), (*tiles, *tiles))], launch((1, 1, 1), operand("x", 1, 128)))
    assert line == "  reads x[0, 0–127] in 2 tiles of 64, 2 times"
    assert rest[1:] == [
        "x[1, 128]: which program owns which tile, numbered in the order of its walk",
        "     program  0–63  64–127",
        "  0        0     1       2",
    ]


def test_masked_and_scattered_lanes_are_counted() -> None:
    masked = read("x", (0, 99), lanes=128)
    scattered = Access("y", "read", ((0, 62),), 32, 32, (32,))
    (_, first, second) = drawn(
        [ProgramAccesses((0, 0, 0), (masked, scattered))], launch((1, 1, 1), operand("x", 100), operand("y", 64))
    )
    assert first == "  reads x[0–99] in 1 tile of 100, 22% of the lanes masked"
    assert second == "  reads y[0–62] in 1 tile of 32, scattered"


def test_programs_of_a_plane_own_tiles_and_many_columns_are_cut() -> None:
    walks = []
    for down, across in ((0, 0), (1, 0), (0, 1), (7, 31)):
        tile = ((128 * down, 128 * down + 127), (128 * across, 128 * across + 127))
        walks.append(
            ProgramAccesses((down, across, 0), (Access("c", "write", tile, 128 * 128, 128 * 128, (128, 128)),))
        )
    assert drawn(walks, launch((8, 32, 1), operand("c", 1024, 4096)))[-6:] == [
        "             program  0–127  128–255  3,968–4,095",
        "      0–127   (0, 0)      1        ·            ·",
        "      0–127   (0, 1)      ·        1            ·",
        "          ⋮        ⋮",
        "    128–255   (1, 0)      1        ·            ·",
        "  896–1,023  (7, 31)      ·        ·            1",
    ]
    wide = [ProgramAccesses((0, 0, 0), tuple(read("x", (0, 0), (n, n)) for n in range(40)))]
    header = drawn(wide, launch((1, 1, 1), operand("x", 1, 40)))[-2].split()
    assert header == ["program", "0", "1", "2", "3", "4", "5", "6", "…", "39"]


def test_nothing_touched_is_no_tile() -> None:
    nothing = Access("x", "read", (), 0, 128, (128,))
    assert drawn([ProgramAccesses((0, 0, 0), (nothing,))], launch((1, 1, 1), operand("x", 0))) == [
        "each walks 0 tiles; program 0"
    ]


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
