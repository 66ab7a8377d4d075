"""The race that settles choices: what is wrong takes no part, draws are the same, the generator stays."""

import pytest
import torch

from tilewright.measure.timing import contest as contest_module
from tilewright.measure.timing.contest import agree, contest

CPU = torch.device("cpu")
X = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest_module, "SECONDS", 0.01)


def test_the_alternative_that_does_a_hundred_times_the_work_loses() -> None:
    def often() -> torch.Tensor:
        for _ in range(99):
            X.exp()
        return X.exp()

    outcome = contest({"often": often, "once": X.exp}, CPU)
    assert outcome.fastest == "once" and set(outcome.times_us) == {"often", "once"}


def test_wrong_results_take_no_part(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = contest({"right": X.exp, "wrong": lambda: X.exp() * 1.01, "also right": X.exp}, CPU)
    assert set(outcome.times_us) == {"right", "also right"}
    assert "wrong was not raced: its results differ from those of right" in capsys.readouterr().err


def test_all_draw_the_same_numbers_and_the_generator_stays() -> None:
    before = torch.get_rng_state()
    outcome = contest({"one": lambda: torch.rand(9), "other": lambda: [torch.rand(3, 3).view(9)]}, CPU)
    assert set(outcome.times_us) == {"one", "other"}
    assert torch.equal(torch.get_rng_state(), before)


def test_rounding_is_no_difference_and_nan_is_one() -> None:
    narrow = X.bfloat16()
    assert agree([(narrow.float() * 1.01).bfloat16()], [narrow])
    assert not agree([narrow * 1.5], [narrow])
    hole = X.clone()
    hole[0, 0] = torch.nan
    assert agree([hole], [hole]) and not agree([X], [hole]) and not agree([hole], [X])
    assert not agree([X[:1]], [X]) and not agree([], [X])
