"""docs/claims.md has a row for every claim, with what was found on each device."""

from benchmarks.claims import PAGE, page, results
from examples.claims.check import documents


def test_every_claim_was_checked_on_each_device() -> None:
    ids = [claim.id for document in documents() for claim in document.claims]
    for device, rows in results().items():
        assert [row.id for row in rows] == ids, device
        assert not [row.id for row in rows if row.verdict == "failed"], device


def test_only_claims_that_need_another_device_are_not_here() -> None:
    claims = {claim.id: claim for document in documents() for claim in document.claims}
    for device, rows in results().items():
        missing = [row.id for row in rows if row.verdict == "not here"]
        other = "cuda" if device == "cpu" else "cpu"
        assert missing == [id_ for id_, claim in claims.items() if claim.needs == other], device


def test_the_page_is_written_from_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(results()), "run python -m benchmarks.claims"


def test_rows_hold_the_claims_as_they_are_worded() -> None:
    claims = {claim.id: claim for document in documents() for claim in document.claims}
    for rows in results().values():
        stale = [row.id for row in rows if (row.claim, row.theirs, row.why) != _words(claims[row.id])]
        assert not stale, "measure these again"


def _words(claim) -> tuple[str, str, str]:
    return claim.text, claim.theirs, claim.why
