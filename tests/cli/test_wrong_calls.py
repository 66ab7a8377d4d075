"""Calls that are wrong: no traceback, the documented exit code, one message: what, where, and what to do."""

import errno
import os
import shlex
import sqlite3
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest
import torch
import typer
from typer.testing import CliRunner

from tests.cli.commands import MODELS, OWN_PATH, Tilewright
from tilewright.bench.catalogue import SUITES
from tilewright.cli.app import EXAMPLES, FIRST, VERBS, app
from tilewright.hardware.profiles import profile_names
from tilewright.store import Run

CALLS = [
    tuple(part.strip() for part in line.split(" | ", 2))
    for line in Path(__file__).with_name("wrong_calls.txt").read_text("utf-8").splitlines()
    if not line.startswith("#")
]
CALLS_EXIT = """import sys

def forward(x):
    sys.exit(3)
    return x

def factory():
    sys.exit('bye')

def raises(x):
    raise SystemExit(3)

def interrupts(x):
    raise KeyboardInterrupt
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the calls name, right or wrong."""
    here = tmp_path_factory.mktemp("files")
    for name in ("models.py", "unicodé → 漢.py", "with space.py"):
        (here / name).write_text(MODELS)
    texts = {
        "empty.py": "",
        "text.txt": "some text\n",
        "syntax.py": "def f(:\n",
        "raises.py": "raise ValueError('first\\nsecond')\n",
        "exits.py": "import sys\nsys.exit(3)\n",
        "calls_exit.py": CALLS_EXIT,
        "object.json": "{}",
    }
    for name, text in texts.items():
        (here / name).write_text(text)
    (here / "binary.py").write_bytes(b"\x00\xff\xfe\xd9")
    for name in ("folder", "folder.py"):
        (here / name).mkdir()
    for name, target in {"dangling.py": "nowhere.py", "loop.py": "loop.py", "linked.py": "models.py"}.items():
        (here / name).symlink_to(target)
    with sqlite3.connect(here / "other.sqlite") as other:
        other.execute("CREATE TABLE a (x)")
    with duckdb.connect(str(here / "foreign.duckdb")) as foreign:
        foreign.execute("CREATE TABLE a AS SELECT 1 AS x")
    with Run.create(here / "run.duckdb", command="c", target="t", case="k"):
        pass
    return here


@pytest.mark.parametrize(("code", "arguments", "message"), CALLS, ids=[call[1] for call in CALLS])
def test_a_wrong_call_has_its_code_and_one_message(
    code: str, arguments: str, message: str, files: Path, home: Path, tilewright: Tilewright,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(files)
    before = sorted(files.iterdir())
    ended = tilewright(*shlex.split(arguments))
    assert (ended.code, ended.out) == (int(code), ""), ended.err
    here = str(home) if message.startswith("no run in") else str(files)
    assert ended.err.startswith("tilewright: ") and message.replace("{here}", here).replace("\\n", "\n") in ended.err
    assert len(ended.err.splitlines()) <= 2 and "Traceback" not in ended.err
    made = [path for path in files.iterdir() if path not in before and path.name != "__pycache__"]
    assert not made and not list(home.rglob("*.duckdb")) and not list(home.rglob("*.partial"))


def test_too_little_memory_a_full_disk_and_faults_are_one_line(
    tilewright: Tilewright, models: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended_with(error: Exception) -> tuple[int, str]:
        def fails(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("tilewright.verbs.explain_case", fails)
        ended = tilewright("explain", f"{models}:small", "--on", "cpu")
        assert ended.err.count("\n") == 1 and "Traceback" not in ended.err
        return ended.code, ended.err

    cpu = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    for error in (
        RuntimeError(f"{cpu}allocate 8000000000 bytes. Error code 12 (Cannot allocate memory)\nframe #0"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8000000000 bytes. GPU 0 has"),
        MemoryError("Unable to allocate 8000000000 bytes for an array"),
    ):
        code, message = ended_with(error)
        assert code == 1 and "out of memory, asked for 8000000000 bytes more: give smaller --inputs" in message
    code, message = ended_with(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a.bin"))
    assert code == 9 and "cannot write a.bin: No space left on device; free some space" in message
    code, message = ended_with(PermissionError(errno.EACCES, os.strerror(errno.EACCES), "a.bin"))
    assert code == 1 and "cannot use a.bin: Permission denied" in message
    # No case and no device is a whole number.
    monkeypatch.setattr("tilewright.verbs.explain_case", int)
    ended = tilewright("explain", f"{models}:small", "--on", "cpu")
    assert ended.code == 1 and "a fault of tilewright at cases.py:" in ended.err
    assert "TILEWRIGHT_TRACEBACK=1 shows the traceback, please report it\n" in ended.err
    monkeypatch.setenv("TILEWRIGHT_TRACEBACK", "1")
    with pytest.raises(TypeError):
        tilewright("explain", f"{models}:small", "--on", "cpu")


def test_a_disk_that_is_full_says_what_to_do(tmp_path: Path) -> None:
    """Files of this child may have 64 KiB."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)); "
        "from tilewright.cli import main; main()"
    )
    trace = tmp_path / "trace.json"
    trace.write_text('{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]}')
    done = subprocess.run(
        [sys.executable, "-c", code, "trace", str(trace)],
        env=os.environ | OWN_PATH | {"TILEWRIGHT_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (9, "") and done.stderr.count("\n") == 1
    assert "cannot write" in done.stderr and "free some space" in done.stderr and "TILEWRIGHT_HOME" in done.stderr


def test_pipes_follow_the_encoding_columns_and_no_color(files: Path) -> None:
    """What the tables show has letters that no latin-1 has."""
    query = "SELECT '→' || repeat('word ', 40) AS text"
    called = [sys.executable, "-m", "tilewright", "sql", query, "--run", str(files / "run.duckdb")]
    given = {"PYTHONIOENCODING": "latin-1", "COLUMNS": "50", "NO_COLOR": "1", "FORCE_COLOR": "1"}
    done = subprocess.run(called, env=os.environ | OWN_PATH | given, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.decode("latin-1").splitlines()
    assert "?word" in lines[1] and max(map(len, lines)) in range(40, 51) and b"\x1b" not in done.stdout


def test_without_a_home_folder_a_variable_names_one(
    tilewright: Tilewright, models: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nowhere)
    monkeypatch.delenv("TILEWRIGHT_HOME")
    ended = tilewright("sql", "SELECT 1")
    assert ended.code == 9 and "set TILEWRIGHT_HOME to a folder that you can write" in ended.err
    assert ended.err.count("\n") == 1


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
