"""Claims are checked by rules of few kinds, each row once, by experiments that run once."""

from dataclasses import replace

import pytest

from examples.claims.check import Row, check_claims, documents, read_rows, selected, write_rows
from examples.claims.claim import close, elsewhere, equal, holds, slower
from examples.claims.lab import Lab
from tilewright.hardware import profiles
from tilewright.measure.timing.benchmark import Timing
from tilewright.records.errors import UsageError
from tilewright.store import runs_dir


@pytest.fixture(autouse=True)
def _known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "local_profile", lambda **_: profiles.profile_for("cpu"))


def timing(us: float, spread: float = 0.01) -> Timing:
    return Timing(us, us * (1 - spread), us * (1 + spread), 9, True)


def test_rules() -> None:
    assert holds(True, "x").verdict == "reproduced" and holds(False, "x").verdict == "refuted"
    assert equal([1000, 200], [1000, 200]).ours == "1,000, 200"
    assert equal(63, 62).verdict == "refuted"
    assert [close(ours, 10).verdict for ours in (8.1, 11.9, 7.9, 12.1)] == ["reproduced"] * 2 + ["refuted"] * 2
    assert elsewhere(False, "x").verdict == "direction does not hold"


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ({"a": timing(20), "b": timing(10)}, "reproduced"),
        ({"a": timing(10), "b": timing(20)}, "refuted"),
        ({"a": timing(11, 0.2), "b": timing(10, 0.2)}, "undecided"),
    ],
)
def test_an_order_of_times_is_decided_outside_their_spread(times, verdict) -> None:
    assert slower(times, "a", "b").verdict == verdict


def test_every_claim_of_the_documents_has_a_row_that_says_what_decides_it() -> None:
    claims = [claim for document in documents() for claim in document.claims]
    counts = {"H": 74, "F": 32, "V": 20, "K": 29, "W": 25}
    assert [claim.id for claim in claims] == [f"{of}{i + 1}" for of, count in counts.items() for i in range(count)]
    for claim in claims:
        assert claim.text.endswith(".") and claim.why.endswith(".") and claim.theirs, claim.id


def test_an_experiment_runs_once_and_each_claim_names_it() -> None:
    rows = list(check_claims(["H2", "H3", "H4", "H45"]))
    assert [(row.id, row.verdict) for row in rows] == [(name, "reproduced") for name in ("H2", "H3", "H4", "H45")]
    assert {row.by for row in rows} == {("tilewright explain examples/naive_softmax.py:small",)}


def test_runs_of_experiments_are_not_among_the_users(tmp_path) -> None:
    lab = Lab("cpu", tmp_path)
    profile = lab.profile("naive_softmax.py:small", 1)
    assert profile.run.parent == tmp_path and profile.value("SELECT count(*) FROM slice") > 0
    assert profile.run not in (runs_dir().iterdir() if runs_dir().exists() else ())


def test_a_failed_experiment_is_not_repeated(tmp_path) -> None:
    lab, calls = Lab("cpu", tmp_path), []

    def fail() -> None:
        calls.append(1)
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            lab.once("it", fail)
    assert calls == [1] and lab.used == ["it"]


def test_a_claim_about_another_device_is_not_checked() -> None:
    (row,) = check_claims(["H37"])
    assert (row.verdict, row.ours, row.by) == ("not here", "needs an NVIDIA GPU", ())


def test_an_unknown_claim_is_refused() -> None:
    with pytest.raises(UsageError, match="no claim 'H999'; they are H1 to H"):
        selected(["H1", "H999"])


def test_rows_of_other_claims_stay_in_a_file(tmp_path) -> None:
    path = tmp_path / "new" / "claims.jsonl"
    first, second = check_claims(["H3", "H4"])
    write_rows(path, [second])
    write_rows(path, [first, replace(second, ours="other")])
    assert [(row.id, row.ours) for row in read_rows(path)] == [("H3", first.ours), ("H4", "other")]
    assert Row.from_json(first.as_json()) == first
