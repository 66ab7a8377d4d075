"""Training on two GPUs (NCCL) under DDP, FSDP2 and tensor parallelism has eager's losses and gradients."""

import pytest
import torch

from tests.backend.ranks import SCENARIOS, train_on_two_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() == 1, reason="needs two CUDA devices, one for each rank; this machine has one"
    ),
]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return train_on_two_ranks(tmp_path_factory.mktemp("ranks"), "cuda")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_training(scenario: str, outcome: tuple[str, str]) -> None:
    printed, errors = outcome
    assert f"{scenario} done" in printed.splitlines(), errors[-20000:]
