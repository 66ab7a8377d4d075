"""Training on two ranks (gloo) under DDP, FSDP2 and tensor parallelism has eager's losses and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import start
from tests.waiting import HANG_S

SCENARIOS = ["ddp", "ddp_no_sync", "fsdp", "tensor_parallel", "column_parallel_result"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What the first of two ranks that run all scenarios printed, and the errors of both."""
    rendezvous: Path = tmp_path_factory.mktemp("ranks") / "rendezvous"
    command = ["-m", "tests.backend.distributing"]
    ranks = [start([*command, str(rank), "2", str(rendezvous), *SCENARIOS]) for rank in range(2)]
    try:
        outputs = [rank.communicate(timeout=HANG_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return outputs[0][0], "".join(errors for _, errors in outputs)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_training(scenario: str, outcome: tuple[str, str]) -> None:
    printed, errors = outcome
    assert f"{scenario} done" in printed.splitlines(), errors[-20000:]
