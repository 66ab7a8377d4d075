"""An operator whose result is not as traced: the call goes on as PyTorch runs it, and nothing of it runs twice."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.backend.compiling import compiled
from tilewright.records import errors
from tilewright.records.errors import CaptureError


def function(mean: torch.Tensor, spread: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`normal` of half and float gives half; PyTorch's fake tensors say float. Before it draws, a write, a kernel and
    views; after it all of these again, which read what came before."""
    before = F.gelu(torch.rand(4, 8) * 2)
    counts.add_(1)
    drawn = torch.normal(mean, spread)
    after = torch.rand(4, 8) + before.sin() * 3
    return drawn, after.t()[1:] * drawn[1:, None], before.softmax(-1) @ after.t(), counts.view(2, 2) * 2


def called(run: Any) -> list[torch.Tensor]:
    counts = torch.zeros(4)
    torch.manual_seed(5)
    results = run(torch.zeros(8).half(), torch.ones(8), counts)
    return [*results, counts, torch.rand(2)]


def test_the_first_call_and_later_ones_are_eager_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TILEWRIGHT_STRICT")
    monkeypatch.setattr(errors, "_warned", set())
    mine, wanted = compiled(function, fullgraph=True), called(function)
    for _ in range(3):
        torch.testing.assert_close(called(mine), wanted)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "runs as PyTorch runs it" in line]
    assert "a compiled graph at test_resume.py" in line and "planned as torch.float32" in line


def test_strict_raises() -> None:
    with pytest.raises(CaptureError, match=r"test_resume\.py.* a result is torch\.float16 \[8\]"):
        called(compiled(function, fullgraph=True))
