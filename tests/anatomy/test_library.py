"""A kernel as the profiler's trace tells it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tilewright.anatomy import library
from tilewright.anatomy.library import generated_cpp, keeping_code

KERNEL = {
    "ph": "X",
    "cat": "kernel",
    "name": "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT",
    "ts": 5000.0,
    "dur": 177.5,
    "args": {"grid": [132, 1, 1], "block": [384, 1, 1], "registers per thread": 168, "shared memory": 213000},
}
LATER = KERNEL | {"name": "splitKreduce", "ts": 6000.0, "dur": 2.5}
OTHER = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 4000.0, "dur": 10.0}


class Profiler:
    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text(json.dumps({"traceEvents": [LATER, OTHER, KERNEL]}))


def test_kernels_are_read_in_order_and_nothing_else() -> None:
    found = library._kernels(Profiler())
    assert [event["name"] for event in found] == [KERNEL["name"], "splitKreduce"]
    launch = library._launch(found[0], "9.0", 177.5)
    assert (launch.grid, launch.threads, launch.registers) == ((132, 1, 1), 384, 168)
    assert (launch.shared_bytes, launch.measured_us, launch.language) == (213000, 177.5, "library")


def test_the_median_is_of_the_calls_and_unwanted_stages_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([9.0, 1.0, 2.0, 3.0, 100.0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(library, "_one_call", lambda _: [KERNEL | {"dur": next(times)}])
    (launch,) = library.profiled(lambda: iter([False, True]), "9.0")
    assert launch.measured_us == 3.0


def test_inductor_s_switches_are_set_back() -> None:
    from torch._inductor import config

    before = config.force_disable_caches
    with keeping_code():
        assert config.force_disable_caches is True
    assert config.force_disable_caches == before


def test_what_inductor_generates_for_a_cpu_is_shown() -> None:
    compiled = torch.compile(lambda x: (x.exp() + 1).sum(-1), dynamic=False)
    (launch, *_) = generated_cpp(lambda: compiled(torch.randn(8, 16)))
    assert launch.language == "cpp" and "exp" in launch.source and "for(" in launch.source
