"""Training on two ranks (gloo) under DDP, FSDP2 and tensor parallelism has eager's losses and gradients."""

import pytest

from tests.backend.ranks import SCENARIOS, train_on_two_ranks


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return train_on_two_ranks(tmp_path_factory.mktemp("ranks"), "cpu")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_training(scenario: str, outcome: tuple[str, str]) -> None:
    printed, errors = outcome
    assert f"{scenario} done" in printed.splitlines(), errors[-20000:]
