"""On a GPU: nothing is lost, device time is what the kernels took, a planted wait is found, NVTX ranges balance."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from tilewright.measure.profile import Plan, Recorder
from tilewright.measure.ranges import Ranges, nvtx
from tilewright.profiling.block import profile
from tilewright.store.query import query

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_HOME", str(tmp_path))
    return tmp_path


class Training:
    """A linear layer of 2048 features and AdamW."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2048, 2048), nn.GELU()).cuda()
        self.rule = torch.optim.AdamW(self.model.parameters())
        self.x = torch.randn(4096, 2048, device="cuda")

    def step(self) -> torch.Tensor:
        self.rule.zero_grad()
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.rule.step()
        return loss


def test_every_kernel_has_its_launch_and_its_operator(home: Path) -> None:
    training = Training()
    with profile(wait=2, warmup=1, active=3) as run:
        for _ in range(8):
            training.step()
    assert run.recording.steps_kept == 3
    assert query(run.path, "FROM loss")[1] == []
    ((attributed,),) = query(run.path, "SELECT percent FROM attribution WHERE what = 'operator'")[1]
    assert attributed >= 98
    ((ours, kernels),) = query(
        run.path, "SELECT (SELECT sum(device_self)::BIGINT FROM operator_time), sum(dur)::BIGINT FROM device_slice"
    )[1]
    assert ours == kernels > 0


def test_a_planted_print_is_found(home: Path) -> None:
    training = Training()
    with profile(wait=2, warmup=1, active=3) as run, open(os.devnull, "w") as nowhere:
        for _ in range(8):
            loss = training.step()
            print(loss, file=nowhere)  # planted
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# planted"))
    places = query(run.path, "SELECT source FROM synchronisation ORDER BY waited_ms_per_step DESC")[1]
    assert places[0][0].endswith(f"{Path(__file__).name}:{line}")


def test_nvtx_ranges_balance() -> None:
    training = Training()
    # The depth of the stack of ranges, before and after.
    before = torch.cuda.nvtx.range_push("outermost")
    with Ranges(nvtx):
        training.step()
    assert torch.cuda.nvtx.range_pop() == before


def test_nvtx_recordings_leave_no_trace(tmp_path: Path) -> None:
    training = Training()
    recorder = Recorder(Plan(wait=1, warmup=1, active=2, nvtx=True), tmp_path / "nowhere", by_optimizer=True)
    recorder.start()
    for _ in range(7):
        training.step()
    done = recorder.stop()
    assert done.steps_kept == 2 and done.trace is None
