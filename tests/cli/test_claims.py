"""`tilewright claims`."""

import json
from dataclasses import replace

from examples.claims.check import documents, read_rows
from examples.claims.claim import Claim
from examples.claims.lab import Lab
from tilewright.bench.peers import example_module
from tilewright.records.errors import VerificationError


def test_command(tmp_path, tilewright) -> None:
    out = tmp_path / "claims.jsonl"
    ended = tilewright("claims", "--only", "H3,H37", "--device", "cpu", "--out", str(out))
    assert ended.code == 0
    assert "reproduced" in ended.out and ended.out.endswith("1 reproduced, 1 not here\n")
    assert len(read_rows(out)) == 2
    line = tilewright("claims", "--only", "H4", "--device", "cpu", "--json").out
    assert json.loads(line)["ours"] == "100"


def test_a_check_that_raises_fails_the_command(monkeypatch, tilewright) -> None:
    (document,) = {document.title: document for document in documents() if document.claims[0].id == "H1"}.values()

    def check(lab: Lab) -> None:
        raise ZeroDivisionError("by zero")

    broken = replace(document, claims=[Claim("H1", "It is.", "1", check, "So.")])
    monkeypatch.setattr(example_module("claims/check.py"), "documents", lambda: [broken])
    ended = tilewright("claims", "--device", "cpu")
    assert ended.code == VerificationError.exit_code and "H1: ZeroDivisionError: by zero" in ended.err
