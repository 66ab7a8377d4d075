"""A race of attention kernels is run once, kept on disk, and followed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tilewright.choose import attention_race
from tilewright.kernels.attention.request import Request
from tilewright.kernels.offer import OURS, THEIRS
from tilewright.records import outcomes
from tilewright.records.outcomes import Outcome

STRIDES = (7 * 3 * 16, 16, 3 * 16, 1)
REQUEST = Request(
    torch.device("cuda:0"), torch.bfloat16, 2, 3, 3, 7, 7, 16, 16, STRIDES, STRIDES, STRIDES, True, 0.25, None, 0
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(outcomes, "_unsaved", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr("tilewright.launch.race.is_captured", lambda device: False)
    yield tmp_path / "cache"


def test_a_race_is_run_once_for_a_request_and_a_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[object] = []
    times = Outcome({THEIRS: 20.0, OURS: 30.0})

    def fixed(alternatives: object, device: torch.device, seconds: float) -> Outcome:
        runs.append(device)
        return times

    def outcome(request: Request, training: bool, measure: bool = False) -> Outcome | None:
        (race,) = attention_race.attention_race(request, training)
        return race.outcome(measure=measure)

    monkeypatch.setattr("tilewright.launch.race.run", fixed)
    assert outcome(REQUEST, True) is None
    assert outcome(REQUEST, True, True) == outcome(REQUEST, True, True) == outcome(REQUEST, True) == times
    assert len(runs) == 1 and outcome(REQUEST, False) is None
    assert outcome(REQUEST._replace(right=None), True) is None
    # The same call on another GPU of the same kind.
    assert outcome(REQUEST._replace(device=torch.device("cuda:1")), True) == times
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another GPU")
    assert outcome(REQUEST, True) is None


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mask", ["none", "boolean", "additive"])
def test_the_operands_of_a_race_lie_as_the_request_says(mask: str, training: bool) -> None:
    request = REQUEST._replace(device=torch.device("cpu"), mask=mask)
    operands = attention_race._operands(request, training)
    assert [x.stride() for x in operands] == [STRIDES] * 3
    assert all(x.requires_grad == training and x.dtype == torch.bfloat16 for x in operands)
    made = attention_race._mask(request)
    assert (made is None) == (mask == "none")
    if made is not None:
        out = torch.nn.functional.scaled_dot_product_attention(*operands, attn_mask=made)
        assert out.isfinite().all()
