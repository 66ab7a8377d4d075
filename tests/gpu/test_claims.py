"""Claims about a GPU: what is counted is the same on every one."""

import pytest

from examples.claims.check import check_claims

pytestmark = pytest.mark.gpu


def test_counts_of_launches_and_programs() -> None:
    rows = {row.id: row for row in check_claims(["H33", "H42", "H48", "H53", "F26", "K2", "W4"], device="cuda")}
    assert {rows[id_].verdict for id_ in ("H33", "H42", "H48", "H53", "K2")} == {"reproduced"}
    # Programs report as many multiprocessors as the device says it has; the order in which they are dealt is its own.
    assert rows["W4"].verdict == "refuted" and rows["F26"].verdict in ("reproduced", "refuted")
