"""Runs scenarios of `distributing.py` in one process for each of two ranks."""

from pathlib import Path

from tests.processes import start
from tests.waiting import HANG_S

SCENARIOS = ["ddp", "fsdp", "tensor_parallel", "column_parallel_result"]


def train_on_two_ranks(folder: Path, device: str) -> tuple[str, str]:
    """The first rank's stdout, and both ranks' stderr. `folder` is empty; `device` is `cpu` or `cuda`."""
    command = ["-m", "tests.backend.distributing"]
    ranks = [start([*command, str(rank), "2", str(folder / "rendezvous"), device, *SCENARIOS]) for rank in range(2)]
    try:
        outputs = [rank.communicate(timeout=HANG_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return outputs[0][0], "".join(errors for _, errors in outputs)
