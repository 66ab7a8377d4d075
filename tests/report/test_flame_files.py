"""Flame graphs as SVG and for speedscope: well formed, complete, and deaf to hostile names."""

import itertools
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.report.test_page import HOSTILE
from tests.report.test_traced_page import write_hostile_trace
from tests.trace.training_trace import TrainingTrace, load
from tilewright.records.errors import StoreError
from tilewright.report.flame import MOST_NODES, drawn, flames, in_order, write_flame, write_speedscope
from tilewright.store import Run

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def made() -> TrainingTrace:
    return TrainingTrace(7)


@pytest.fixture(scope="module")
def run(made: TrainingTrace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flame")
    return load(made.write(folder / "trace.json"), folder / "run.duckdb")


def test_speedscope_replays_to_the_same_stacks(made: TrainingTrace, run: Path, tmp_path: Path) -> None:
    data = json.loads(write_speedscope(run, tmp_path / "s.json").read_text("utf-8"))
    assert data["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = [
        f"{frame['file']}({frame['line']}): {frame['name']}" if "file" in frame else frame["name"]
        for frame in data["shared"]["frames"]
    ]
    for profile, truth in zip(data["profiles"], (made.host, made.device), strict=True):
        assert profile["type"] == "evented" and profile["unit"] == "nanoseconds"
        stack: list[str] = []
        own: dict[tuple[str, ...], int] = {}
        last = profile["startValue"]
        for event in profile["events"]:
            assert event["at"] >= last
            path = tuple(stack[1:])
            own[path] = own.get(path, 0) + event["at"] - last
            last = event["at"]
            if event["type"] == "O":
                stack.append(frames[event["frame"]])
            else:
                assert stack.pop() == frames[event["frame"]]
        assert not stack and last == profile["endValue"]
        assert {path: time for path, time in own.items() if time} == {
            path: time for path, time in truth.items() if time
        }


def test_the_svg_draws_every_frame_in_its_callers(run: Path, tmp_path: Path) -> None:
    root = ET.parse(write_flame(run, tmp_path / "f.svg")).getroot()
    assert not [node for node in root.iter() if node.tag == f"{SVG}script"]
    boxes = [(group.find(f"{SVG}title"), group.find(f"{SVG}rect")) for group in root.iter(f"{SVG}g")]
    assert len(boxes) > 20
    rows: dict[float, list[tuple[float, float]]] = {}
    for title, rect in boxes:
        assert title is not None and title.text and rect is not None
        rows.setdefault(float(rect.attrib["y"]), []).append((float(rect.attrib["x"]), float(rect.attrib["width"])))
    order = sorted(rows)
    for above, row in itertools.pairwise(order):
        for x, width in rows[row]:
            assert any(left - 0.02 <= x and x + width <= left + wide + 0.02 for left, wide in rows[above])
        spans = sorted(rows[row])
        assert all(a + wide <= b + 0.02 for (a, wide), (b, _) in itertools.pairwise(spans))


def test_the_page_gets_the_largest_nodes_before_their_children(run: Path) -> None:
    for tree in flames(run):
        few = list(in_order(tree, 10))
        assert [node.total for node in few] == sorted((node.total for node in few), reverse=True) or len(few) == 10
        assert sorted((n.total for n in few), reverse=True) == sorted(tree.total.tolist(), reverse=True)[:10]
        whole = drawn(tree)
        assert whole["left_out"] == max(0, tree.parent.size - MOST_NODES)
        depths = [node[1] for node in whole["nodes"]]
        assert depths[0] == 0 and all(b <= a + 1 for a, b in itertools.pairwise(depths))


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    run = write_hostile_trace(tmp_path)
    root = ET.parse(write_flame(run, tmp_path / "f.svg")).getroot()
    assert {node.tag.removeprefix(SVG) for node in root.iter()} == {"svg", "style", "rect", "text", "g", "title"}
    names = {
        frame["name"]
        for frame in json.loads(write_speedscope(run, tmp_path / "s.json").read_text())["shared"]["frames"]
    }
    assert HOSTILE in names


def test_a_run_without_a_timeline(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run.duckdb", command="c", target="t", case="nothing"):
        pass
    for write in (write_flame, write_speedscope):
        with pytest.raises(StoreError, match="has no timeline"):
            write(tmp_path / "run.duckdb", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_cannot_be_written(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write the flame graph"):
        write_flame(run, tmp_path / "file" / "f.svg")
    with pytest.raises(StoreError, match="cannot write the speedscope file"):
        write_speedscope(run, tmp_path / "file" / "s.json")
