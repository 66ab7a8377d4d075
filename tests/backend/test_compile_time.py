"""Compile time of the Transformer block, against twice the targets and in processor time: machines that run
tests are noisy."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.compile_time import in_a_process

COLD_S, WARM_S, SECOND_S = 3.0, 1.5, 0.3


@pytest.fixture(scope="module")
def seconds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    folder: Path = tmp_path_factory.mktemp("caches")
    cold = in_a_process("tilewright", folder, "processor")["first"]
    return {"cold": cold, **in_a_process("tilewright", folder, "processor")}


def test_cold(seconds: dict[str, float]) -> None:
    assert seconds["cold"] < 2 * COLD_S


def test_a_fresh_process_with_a_warm_cache(seconds: dict[str, float]) -> None:
    assert seconds["first"] < 2 * WARM_S


def test_a_second_block_in_one_process(seconds: dict[str, float]) -> None:
    assert seconds["second"] < 2 * SECOND_S
