"""`tilewright bench` of a suite: table, JSON lines, file, plot, and the exit code of a cheat."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from examples.claims.check import documents, read_rows
from examples.claims.claim import Claim
from examples.claims.lab import Lab
from tests.cli.commands import Tilewright
from tilewright.bench.peers import example_module
from tilewright.records.errors import VerificationError
from tilewright.records.measurement import Measurement

OWN = """
from tests.measure.racing.cheats import Variant, reference, skipped_rows, suite
from tilewright.measure.racing.user_suite import user_suite
from tilewright.records.case import Case, InputSpec

honest = suite(reference)
cheat = suite(skipped_rows())
wrong_peer = suite(skipped_rows(), Variant("tilewright", "torch", reference))
wrong_own = suite(reference, Variant("tilewright", "torch", skipped_rows()))
case = Case("double", lambda: lambda x: x + x, [InputSpec.parse("fp32[N=4]")])
mine = user_suite("mine", {"mine": lambda x: x * x.sigmoid()}, "fp32[N=64,M=32]", reference=lambda x: x * x.sigmoid())
"""
OF_MODELS = {"gpu_us", "launches", "first_call_us"}
"""Fields that rows of whole models have."""
OF_SOME = {"note", "sources", "package"}
"""Fields that rows have where there is something to say."""
FIELDS = {field.name for field in fields(Measurement)} - OF_SOME - OF_MODELS


@pytest.fixture
def own(tmp_path: Path, short_races: None) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


def test_a_table_of_every_way(tilewright: Tilewright, own: str) -> None:
    ended = tilewright("bench", f"{own}:honest", "--shapes", "40x8", "--direction", "fwd", "--seconds", "0.05")
    assert ended.code == 0 and ended.err == ""
    assert ended.lines[0].startswith("ramp 40x8 float32 fwd · copy ")
    rows = {row[0]: row for row in (re.split(r"\s{2,}", line) for line in ended.lines[2:4])}
    assert sorted(rows) == ["eager", "suspect"]
    # On a busy machine the spread of its times may leave the ratio open.
    assert {"1.00×", "noisy"} & set(rows["eager"][9:])


def test_json_lines_have_the_documented_fields(tilewright: Tilewright, own: str) -> None:
    ended = tilewright("bench", f"{own}:honest", "--shapes", "40x8", "--seconds", "0.05", "--json")
    rows = [json.loads(line) for line in ended.out.splitlines()]
    ways = [(row["impl"], row["direction"]) for row in rows]
    assert ways == [(impl, direction) for direction in ("fwd", "bwd") for impl in ("suspect", "eager")]
    assert all(set(row) - OF_SOME == FIELDS for row in rows)


def test_a_second_run_rewrites_its_rows(tilewright: Tilewright, own: str, tmp_path: Path) -> None:
    out = tmp_path / "h200" / "ramp.jsonl"
    arguments = ["bench", f"{own}:honest", "--direction", "fwd", "--seconds", "0.05", "--out", str(out), "-q"]
    tilewright(*arguments, "--shapes", "40x8,20x8")
    first = [json.loads(line) for line in out.read_text().splitlines()]
    tilewright(*arguments, "--shapes", "40x8", "--impl", "eager")
    second = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(first) == len(second) == 4
    assert [row != other for row, other in zip(first, second, strict=True)] == [False, False, True, False]


@pytest.mark.parametrize(
    ("name", "code", "impls", "wrong"),
    [
        ("cheat", 8, ["eager"], "suspect"),
        ("wrong_peer", 0, ["eager", "tilewright"], "suspect"),
        ("wrong_own", 8, ["eager", "suspect"], "tilewright"),
    ],
)
def test_a_cheat_breaks_the_contract_unless_it_is_tilewrights_peer(
    tilewright: Tilewright, own: str, name: str, code: int, impls: list[str], wrong: str
) -> None:
    arguments = ["--shapes", "40x8", "--direction", "fwd", "--seconds", "0.05"]
    ended = tilewright("bench", f"{own}:{name}", *arguments)
    assert ended.code == code
    assert sorted(line.split()[0] for line in ended.lines[2 : 2 + len(impls)]) == impls
    refusal = f"{wrong} refused: fwd output 0 is wrong"
    assert (refusal in ended.out, refusal in ended.err) == (True, code == 8)


def test_an_own_case_takes_sizes_by_name_and_is_drawn(tilewright: Tilewright, own: str, tmp_path: Path) -> None:
    plot = tmp_path / "rates.svg"
    ended = tilewright(
        *("bench", f"{own}:mine", "--shapes", "100x8,50x8", "--seconds", "0.05", "--json", "--plot", str(plot))
    )
    assert [json.loads(line)["case"] for line in ended.out.splitlines()] == ["N100 M8 float32"] * 2 + [
        "N50 M8 float32"
    ] * 2
    drawn = plot.read_text()
    assert all(text in drawn for text in ("N100 M8", "N50 M8", "mine", "eager", "GB/s"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "OWN:honest", "--sweep", "rows"], "ramp has no sweep 'rows'; known: none"),
        (["bench", "OWN:honest", "--inference"], "leave --training out"),
        (["bench", "OWN:case", "--shapes", "4", "--sweep", "x"], "is a case: leave --shapes, --sweep out"),
        (["bench", "OWN:mine", "--shapes", "4"], "mine has the sizes N, M, not 1"),
    ],
)
def test_misuse_is_said_in_a_line(tilewright: Tilewright, own: str, arguments: list[str], message: str) -> None:
    ended = tilewright(*(argument.replace("OWN", own) for argument in arguments))
    assert ended.code == 2 and ended.out == "" and message in ended.err


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
