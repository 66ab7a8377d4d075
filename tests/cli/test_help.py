"""Help and completion: every verb has an example that is understood; values of options and arguments are offered."""

import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.cli.commands import Tilewright
from tilewright.bench.catalogue import SUITES
from tilewright.cli.app import EXAMPLES, FIRST, VERBS, app
from tilewright.hardware.profiles import profile_names

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
FIRST_CALLS = [line.split("    ")[0].strip() for line in FIRST.splitlines() if line.startswith("  tilewright")]


@pytest.mark.parametrize("call", [*EXAMPLES.values(), *FIRST_CALLS])
def test_examples_are_understood(call: str) -> None:
    _, verb, *rest = shlex.split(call)
    assert COMMANDS[verb].make_context(verb, rest)


def test_help_of_each_verb_ends_with_its_example(tilewright: Tilewright) -> None:
    assert list(EXAMPLES) == list(VERBS)
    for verb in VERBS:
        assert shlex.split(EXAMPLES[verb])[1] == verb.__name__
    assert EXAMPLES[VERBS[0]] in tilewright("doctor", "--help").out


def completed(words: str) -> list[str]:
    """What bash is offered behind `tilewright words`."""
    typed = ["tilewright", *words.split(" ")]
    asked = {"_TILEWRIGHT_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(typed), "COMP_CWORD": str(len(typed) - 1)}
    return CliRunner().invoke(app, prog_name="tilewright", env=asked).output.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("bench ", list(SUITES)),
        ("kernel weig", ["weighted_sum"]),
        ("explain x.py:y --on ", list(profile_names())),
        ("kernel softmax --on a", ["a100"]),
        ("bench softmax --direction fwd", ["fwd", "fwd+bwd"]),
        ("optimize x.py:y --device cu", ["cuda"]),
        ("diff ", []),
    ],
)
def test_values_are_offered(home: Path, words: str, offered: list[str]) -> None:
    assert completed(words) == offered


def test_the_newest_runs_are_offered_first(home: Path) -> None:
    folder = home / "runs"
    folder.mkdir(parents=True)
    names = [f"20260101T0000{second:02}.000000Z-model.duckdb" for second in range(25)]
    for name in names:
        (folder / name).touch()
    assert completed("sql x --run ") == [str(folder / name) for name in names[:4:-1]]
