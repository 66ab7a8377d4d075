"""Measured ceilings of a GPU, as far as any card must agree, and shared memory against the clock."""

from __future__ import annotations

import pytest
import torch

from tilewright.hardware.ceilings import measure_ceilings
from tilewright.hardware.datasheet import datasheet_of

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def values() -> dict[tuple[str, str], float]:
    return {(ceiling.kind, ceiling.dtype): ceiling.value for ceiling in measure_ceilings("cuda")}


def test_figures_stand_in_proportion(values: dict[tuple[str, str], float]) -> None:
    assert 50 < values["copy", "float32"] < 20_000
    assert values["cache", "float32"] > values["copy", "float32"]
    assert values["shared", "int32"] > values["cache", "float32"]
    assert values["matmul", "float16"] > 2 * values["matmul", "float32"]
    assert values["matmul", "bfloat16"] > values["matmul", "tf32"] > values["matmul", "float32"]
    assert values["launch in a graph", ""] < values["launch", ""] < 50
    assert 1 < values["host to device", ""] < 1000 and 1 < values["device to host", ""] < 1000
    assert ("first touch", "float32") not in values


def test_nothing_beats_the_datasheet(values: dict[tuple[str, str], float]) -> None:
    datasheet = datasheet_of(torch.cuda.get_device_name())
    if datasheet is None or datasheet.shared_GBps is None:
        pytest.skip(f"no datasheet of {torch.cuda.get_device_name()}")
    for kind in ("copy", "read", "write"):
        assert 0.5 * datasheet.dram_GBps < values[kind, "float32"] <= datasheet.dram_GBps
    for dtype in ("bfloat16", "float16", "tf32", "float32"):
        assert values["matmul", dtype] <= datasheet.matmul_TFLOPs[dtype]
    assert 0.8 * datasheet.shared_GBps < values["shared", "int32"] <= datasheet.shared_GBps
