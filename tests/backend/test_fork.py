"""A compiled function still runs, and nothing hangs, in a process forked after its first call."""

import subprocess

import pytest

from tests.processes import start
from tests.waiting import HANG_S

SCENARIOS = ["fork_after_a_call", "fork_while_others_allocate", "data_loader_workers", "a_pool_of_processes"]


@pytest.fixture(scope="module")
def outcome() -> tuple[str, str]:
    """What a process that runs all scenarios printed, and its errors."""
    process = start(["-m", "tests.backend.forking", *SCENARIOS])
    try:
        return process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_fork(scenario: str, outcome: tuple[str, str]) -> None:
    printed, errors = outcome
    assert f"{scenario} done" in printed.splitlines(), errors
