"""Memory snapshots by the structure that PyTorch documents: totals by hand, who holds what, and files that run code."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from tests.trace.loading import rows
from tilewright.records.errors import TraceError
from tilewright.store.query import reading
from tilewright.trace import trace_run
from tilewright.trace.memory import memory

MB = 1_000_000
LINEAR = ("/v/site-packages/torch/nn/modules/linear.py", 134, "forward")
MODEL = ("/home/me/model.py", 12, "encode")
TRAIN = ("/home/me/train.py", 40, "main")
ENGINE = ("/v/site-packages/torch/autograd/graph.py", 865, "_engine_run_backward")


def frames(*stack: tuple[str, int, str]) -> list[dict[str, object]]:
    return [{"filename": file, "line": line, "name": name} for file, line, name in stack]


def entry(action: str, address: int, megabytes: int, *stack: tuple[str, int, str]) -> dict[str, object]:
    """All in the same microsecond, which happens."""
    place = {"addr": address * MB, "size": megabytes * MB, "stream": 0, "time_us": 1_700_000_000_000_000}
    return {"action": action, "frames": frames(*stack), **place}


def block(megabytes: int, state: str, *stack: tuple[str, int, str]) -> dict[str, object]:
    return {"size": megabytes * MB, "requested_size": megabytes * MB - 24, "state": state, "frames": frames(*stack)}


def snapshot(*more: dict[str, object]) -> dict[str, Any]:
    """A segment of 64 MB, 5 of them from before the history; at the peak 38 are in the history's blocks."""
    blocks = [
        block(20, "active_allocated", LINEAR, MODEL, TRAIN), block(10, "inactive"),
        block(8, "active_allocated", ENGINE, TRAIN), block(5, "active_allocated"), block(21, "inactive"),
    ]  # fmt: skip
    at = 0
    for each in blocks:
        each["address"], at = at, at + int(str(each["size"]))
    sizes = {"total_size": 64 * MB, "allocated_size": 33 * MB, "active_size": 33 * MB}
    segment = {"device": 0, "address": 0, "stream": 0, "segment_type": "large", "blocks": blocks, **sizes}
    history = [
        entry("segment_alloc", 0, 64),
        entry("alloc", 0, 20, LINEAR, MODEL, TRAIN), entry("alloc", 20, 10, LINEAR, MODEL, TRAIN),
        entry("alloc", 30, 8, ENGINE, TRAIN),
        entry("free_requested", 20, 10), entry("free_completed", 20, 10),
    ]  # fmt: skip
    return {"segments": [segment], "device_traces": [[*history, *more]]}


def run_of(found: object, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_HOME", str(folder))
    path = folder / "snapshot.pickle"
    path.write_bytes(found if isinstance(found, bytes) else pickle.dumps(found))
    return trace_run([path], command="", tell=lambda _: None)[0]


def test_peak_holders_and_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = snapshot()
    # PyTorch's own reader takes it, and counts the same.
    assert "61.0MiB allocated, 29.6MiB (0.0% internal) free" in _memory_viz.segsum(made)
    with reading(run_of(made, tmp_path, monkeypatch)) as connection:
        (gpu,) = memory(connection)
        assert gpu.device == "GPU 0" and gpu.peak_bytes == 43 * MB
        held = [(each.operator, each.phase, each.bytes) for each in gpu.holders]
        assert held == [
            ("model.py:12 encode", "forward", 30 * MB),
            ("train.py:40 main", "backward", 8 * MB),
            ("before the profile", "other", 5 * MB),
        ]
        assert gpu.reserved.tolist() == [64 * MB] * 4 and gpu.allocated[-1] == 33 * MB
        sql = (
            "SELECT source, layer, sum(bytes) FROM memory_block WHERE state <> 'inactive' GROUP BY ALL ORDER BY 3 DESC"
        )
        assert rows(connection, sql) == [
            ("model.py:12", "linear", 20 * MB), ("train.py:40", None, 8 * MB), (None, None, 5 * MB)
        ]  # fmt: skip
        assert rows(connection, "SELECT DISTINCT bytes - requested_bytes FROM memory_block") == [(24,)]
        said = [sentence for (sentence,) in rows(connection, "SELECT sentence FROM verdict ORDER BY place")]
    assert said == [
        "GPU 0 holds 43 MB at the peak; 64 MB are reserved in the end, and 48 % of that is in no use.",
        "Most is held by model.py:12 encode (30 MB, 70 % of the peak, forward).",
    ]


@pytest.mark.parametrize(("asked", "why", "action"), [(30, "fragmented", "expandable"), (40, "held by", "38 MB less")])
def test_an_allocation_that_failed(
    asked: int, why: str, action: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = entry("oom", 0, asked, LINEAR, MODEL, TRAIN) | {"device_free": 2 * MB}
    with reading(run_of(snapshot(failed), tmp_path, monkeypatch)) as connection:
        asked_for = rows(connection, "SELECT bytes, device_free, allocated, reserved, source FROM out_of_memory")
        said = [sentence for (sentence,) in rows(connection, "SELECT sentence FROM verdict ORDER BY place")]
    assert asked_for == [(asked * MB, 2 * MB, 33 * MB, 64 * MB, "model.py:12")]
    assert said[0] == f"GPU 0 is out of memory: {asked} MB could not be allocated at model.py:12."
    assert "31 MB in no use, and the driver had 2 MB left" in said[1] and why in said[1] and action in said[2]


class Runs:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("ran",)


# Room in the memo for four billion objects.
BOMB = b"\x80\x02]r\xfe\xff\xff\xff."


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (pickle.dumps({"segments": [], "device_traces": [Runs()]}), "would run"),
        (BOMB, "more memory than it can need"),
        (pickle.dumps(snapshot())[:-200], "is not read as a memory snapshot"),
        (pickle.dumps([1, 2]), "no memory snapshot"),
        (pickle.dumps({"segments": [], "device_traces": [3]}), "no memory snapshot"),
    ],
)
def test_a_pickle_that_is_no_plain_snapshot(
    content: bytes, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match=why):
        run_of(content, tmp_path, monkeypatch)
    assert not (tmp_path / "ran").exists()
