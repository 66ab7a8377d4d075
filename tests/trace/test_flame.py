"""Folded stacks against a truth that is written down while the trace is made, and against hand-drawn ones."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trace.kineto import Analysis
from tests.trace.loading import complete, loaded_events, rows
from tests.trace.training_trace import TrainingTrace
from tilewright.trace.flame import DEEPEST, NOT_LAUNCHED, Flame, Weight, flame


def folded(tree: Flame) -> dict[tuple[str, ...], int]:
    """Own time of every stack that has some, without the root."""
    paths: list[tuple[str, ...]] = []
    for parent, frame in zip(tree.parent.tolist(), tree.frame.tolist(), strict=True):
        paths.append((*paths[parent], tree.names[frame]) if parent >= 0 else ())
    own: Counter[tuple[str, ...]] = Counter()
    for path, time in zip(paths, tree.own.tolist(), strict=True):
        own[path] += time
    return {path: time for path, time in own.items() if time}


def flame_of(events: list[dict[str, Any]], weight: Weight = "host") -> Flame:
    return flame(loaded_events(events)[0], weight)


def host(name: str, ts: float, dur: float, category: str = "cpu_op", **more: Any) -> dict[str, Any]:
    return complete(name, ts, dur, cat=category, **more)


@pytest.mark.parametrize("stacks", [True, False], ids=["with Python frames", "operators alone"])
@pytest.mark.parametrize("seed", range(3))
def test_both_weights_equal_what_the_trace_was_made_from(seed: int, stacks: bool) -> None:
    made = TrainingTrace(seed, stacks=stacks)
    connection, _ = loaded_events(made.events)
    by_host, by_device = flame(connection, "host"), flame(connection, "device")
    assert folded(by_host) == {path: time for path, time in made.host.items() if time}
    assert folded(by_device) == dict(made.device)
    assert by_host.total[0] == sum(made.host.values()) and by_device.total[0] == sum(made.device.values())
    assert by_host.steps == 2


def test_totals_are_own_times_and_children() -> None:
    tree = flame_of(TrainingTrace(5).events)
    below = np.bincount(tree.parent[1:], weights=tree.total[1:], minlength=tree.parent.size)
    np.testing.assert_array_equal(tree.total, tree.own + below.astype(np.int64))
    assert (tree.parent[1:] < np.arange(1, tree.parent.size)).all()


def test_equal_stacks_of_all_steps_are_one() -> None:
    events = []
    for step in range(3):
        frame = f"<built-in method linear of type object at 0x7f{step}>"
        events += [host(f"ProfilerStep#{step}", 100 * step, 50, "user_annotation"), host(frame, 100 * step + 1, 10)]
    tree = flame_of(events)
    assert len(tree.names) == 4 and tree.steps == 3
    assert folded(tree) == {
        ("thread", "ProfilerStep"): 3 * 40_000,
        ("thread", "ProfilerStep", "<built-in method linear of type object>"): 3 * 10_000,
    }
    assert sorted(tree.calls.tolist()) == [0, 0, 3, 3]


def test_a_kernel_whose_launch_is_missing_is_not_lost() -> None:
    kernel = host("k", 3, 4, "kernel")
    assert folded(flame_of([kernel], "device")) == {(NOT_LAUNCHED, "k"): 4_000}


def test_the_operator_of_what_a_graph_replayed_is_told(tmp_path: Path) -> None:
    analysis = Analysis([TrainingTrace(4).write(tmp_path / "trace.json")])
    analysis.ask(lambda connection: connection.execute("FROM device_slice"))
    connection = analysis.connection
    connection.execute("UPDATE device_slice SET launch_id = NULL, operator = 'aten::mm' WHERE name LIKE 'sm90%'")
    connection.execute("UPDATE device_slice SET launch_id = NULL, operator = NULL WHERE name LIKE 'softmax%'")
    tree = flame(connection, "device")
    times = dict(rows(connection, "SELECT name, sum(dur)::BIGINT FROM device_slice GROUP BY name"))
    apart = {path: time for path, time in folded(tree).items() if path[0] == NOT_LAUNCHED}
    assert apart == {
        (NOT_LAUNCHED, "aten::mm", "sm90_xmma_gemm_bf16"): times["sm90_xmma_gemm_bf16"],
        (NOT_LAUNCHED, "softmax_warp_forward"): times["softmax_warp_forward"],
    }
    assert tree.total[0] == sum(times.values())


def test_time_below_the_deepest_row_counts_for_its_ancestor() -> None:
    deep = DEEPEST + 50
    tree = flame_of([host(f"f{i}", i, 2 * deep - 2 * i) for i in range(deep)])
    assert tree.total[0] == 2 * deep * 1_000
    assert max(len(path) for path in folded(tree)) == DEEPEST + 1


def test_threads_that_wait_and_the_recorders_frames_are_left_out() -> None:
    python = "python_function"
    waiting = [
        host("threading.py(1002): _bootstrap", 0, 100, python) | {"tid": 2},
        host("tilewright/measure/recording/guard.py(76): _poll", 1, 90, python) | {"tid": 2},
    ]
    events = [
        host("<frozen runpy>(88): _run_code", 0, 100, python),
        host("tilewright/profiling/start.py(51): main", 1, 98, python),
        host("train.py(3): <module>", 2, 90, python),
        host("aten::mm", 10, 40),
    ]
    tree = flame_of(events + waiting)
    assert folded(tree) == {
        ("thread",): 10_000,
        ("thread", "train.py(3): <module>"): 50_000,
        ("thread", "train.py(3): <module>", "aten::mm"): 40_000,
    }
    assert tree.calls.tolist() == [0, 0, 1, 1]


def test_python_alone_is_all_there_is() -> None:
    events = [host("train.py(3): <module>", 2, 90, "python_function") | {"tid": thread} for thread in (1, 2)]
    assert sum(folded(flame_of(events)).values()) == 180_000


@pytest.mark.parametrize("weight", ["host", "device"])
def test_a_trace_of_instants_has_an_empty_flame(weight: Weight) -> None:
    tree = flame_of([{"ph": "i", "name": "x", "pid": 1, "tid": 1, "ts": 1}], weight)
    assert tree.total.tolist() == [0] and folded(tree) == {}
