"""Regions are raced on a GPU as on a CPU; what a race leaves is kept and followed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.passes.graphs import aten
from tilewright.choose.attention_race import Raced, races_of
from tilewright.choose.fused_regions import APART, FUSED, race_regions, settle
from tilewright.hardware.profiles import profile_for
from tilewright.hardware.target import Target, target_of
from tilewright.kernels.attention.request import Request
from tilewright.kernels.offer import THEIRS
from tilewright.passes.attention.library import CUDNN, FLASH, OWN
from tilewright.passes.fusion import fuse, split_region

pytestmark = pytest.mark.gpu


def normalised(x: Tensor) -> Tensor:
    e = (x - x.amax(1, keepdim=True)).exp()
    return e / e.sum(1, keepdim=True)


def test_a_region_is_raced_on_a_gpu() -> None:
    (region,) = fuse(
        aten(normalised, torch.zeros(4096, 4096, device="cuda")), "forward", target_of(torch.device("cuda"))
    ).regions
    parts = split_region(region)
    assert parts is not None and len(parts) == 5
    (outcome,) = race_regions([(region, parts)])
    assert outcome.times_us.keys() == {FUSED, APART} and min(outcome.times_us.values()) > 0


def test_an_outcome_is_kept_and_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    # Nothing was timed on such a device, so that prediction cannot tell.
    target = Target(replace(profile_for("h200"), kernel_times={}))
    proposed = fuse(aten(normalised, torch.zeros(512, 4096, device="cuda")), "forward", target_of(torch.device("cuda")))
    settled = settle(proposed, replace(target, measures=True))
    assert len(list(tmp_path.rglob("*.race.json"))) == 1
    assert {decision.measured_us is not None for decision in settled.decisions} == {True}
    assert settle(proposed, target).decisions == settled.decisions


def test_a_race_with_one_key_asks_no_library_that_would_crash() -> None:
    """cuDNN's backward of one key does, in PyTorch 2.11."""
    lies = torch.empty(1, 2, 1, 160).stride()
    request = Request(
        torch.device("cuda:0"), torch.float16, 1, 2, 2, 1, 1, 160, 160, lies, lies, lies, True, 0.1, None, 0
    )  # fmt: skip
    raced = Raced(request, FLASH, causal=True, bias=None, training=True, others=(OWN, CUDNN))
    for race in races_of(raced):
        found = race.outcome()
        assert found is not None and found.times_us.keys() == {THEIRS, OWN.name}
