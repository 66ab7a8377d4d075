"""`tilewright plan`: what one machine measured, another of the kind follows."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import Tilewright
from tilewright.hardware import ceilings
from tilewright.records import outcomes
from tilewright.records.cache import key_of
from tilewright.records.measurement import Ceiling
from tilewright.records.outcomes import Outcome

KEY, OTHER = key_of("a region", "a device"), key_of("another", "a device")


def on_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(folder / "cache"))
    monkeypatch.setenv("TILEWRIGHT_HOME", str(folder / "home"))


def test_another_machine_follows_what_one_measured(
    tilewright: Tilewright, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plan.json"
    on_machine(tmp_path / "one", monkeypatch)
    outcomes.keep(KEY, Outcome({"fused": 3.0, "apart": 2.0}))
    outcomes.keep(OTHER, Outcome({"fused": 5.0, "apart": 6.0}))
    ceilings.keep_ceilings([Ceiling("a device", "copy", "float32", 10.0, "GB/s", "measured")])
    ended = tilewright("plan", "export", str(file))
    assert (ended.code, ended.err) == (
        0,
        "",
    ) and "outcomes of races: 2, files of ceilings and kernel times: 1" in ended.out

    on_machine(tmp_path / "two", monkeypatch)
    outcomes.keep(OTHER, Outcome({"fused": 7.0, "apart": 1.0}))
    ended = tilewright("plan", "import", str(file))
    assert (ended.code, ended.err) == (
        0,
        "",
    ) and "taken over, outcomes of races: 1, files of ceilings and kernel times: 1" in ended.out
    taken, own = outcomes.lookup(KEY), outcomes.lookup(OTHER)
    assert taken is not None and taken.fastest == "apart" and taken.times_us == {"fused": 3.0, "apart": 2.0}
    # What this machine measured itself stays.
    assert own is not None and own.times_us["fused"] == 7.0
    assert ceilings.kept_ceilings("a device") is not None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"format": 1}',
        '{"format": 2, "outcomes": {}, "machines": {}}',
        json.dumps({"format": 1, "outcomes": {}, "machines": {"../../escape.json": {}}}),
        json.dumps({"format": 1, "outcomes": {"../" + "0" * 29: {"a": 1.0}}, "machines": {}}),
        json.dumps({"format": 1, "outcomes": {KEY: {"a": -1.0}}, "machines": {}}),
        json.dumps({"format": 1, "outcomes": {KEY: {}}, "machines": {}}),
    ],
)
def test_a_file_that_is_no_plan_is_refused_whole(
    content: str, tilewright: Tilewright, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine(tmp_path / "here", monkeypatch)
    file = tmp_path / "plan.json"
    file.write_text(content)
    ended = tilewright("plan", "import", str(file))
    assert ended.code == 2 and "is no plan" in ended.err
    assert not (tmp_path / "here").exists() and not (tmp_path / "escape.json").exists()


def test_a_plan_that_is_not_there(tmp_path, tilewright) -> None:
    ended = tilewright("plan", "import", str(tmp_path / "missing"))
    assert (
        ended.code == 2 and ended.err == f"tilewright: cannot read {tmp_path / 'missing'}: No such file or directory\n"
    )
