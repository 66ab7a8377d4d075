"""An outcome is kept for all processes; a damaged one is forgotten, one that cannot be kept holds for this process."""

from pathlib import Path

import pytest

from tilewright.records import outcomes
from tilewright.records.outcomes import Outcome

FOUND = Outcome({"ours": 10.0, "theirs": 30.0})


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "{}", '{"ours": "x", "theirs": 2}', '{"ours": NaN}'])
def test_a_damaged_outcome_is_forgotten(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    outcomes.keep("0123", FOUND)
    assert outcomes.lookup("0123") == FOUND
    (entry,) = tmp_path.rglob("*.race.json")
    entry.write_text(content)
    assert outcomes.lookup("0123") is None and not entry.exists()


def test_an_outcome_that_cannot_be_kept_holds_for_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "_unsaved", {})
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file" / "cache"))
    outcomes.keep("0123", FOUND)
    assert outcomes.lookup("0123") == FOUND
