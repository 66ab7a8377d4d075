"""Failures of the machine: one message on stderr, nothing on stdout, the documented code, nothing left behind."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import Tilewright
from tests.waiting import HANG_S
from tilewright import __version__
from tilewright.runtime import compiler

WITHOUT_PYTORCH = "PyTorch is not installed: pip install torch; trace, sql, report, diff and whatif work without it"


def test_without_a_command_it_says_what_to_do_first(tilewright: Tilewright) -> None:
    ended = tilewright()
    assert (ended.code, ended.err) == (2, "")
    assert all(f"tilewright {verb}" in ended.out for verb in ("doctor", "profile", "explain", "optimize"))
    assert all(verb in tilewright("--help").out for verb in ("doctor", "explain", "bench", "sql", "report"))
    assert tilewright("explain", "--help").code == 0
    assert tilewright("explain", "-h").out == tilewright("explain", "--help").out


def test_the_version_is_that_of_the_package(tilewright: Tilewright) -> None:
    ended = tilewright("--version")
    assert (ended.code, ended.out) == (0, f"tilewright {__version__}\n")
    as_module = subprocess.run([sys.executable, "-m", "tilewright", "--version"], capture_output=True, text=True)
    assert as_module.stdout == ended.out


def test_without_pytorch_it_says_so(tmp_path: Path) -> None:
    """And reads traces, as `tests/trace/test_load.py` has it."""
    blocked = "import sys; sys.modules['torch'] = None; from tilewright.cli.app import main; main()"
    environment = os.environ | {"TILEWRIGHT_HOME": str(tmp_path)}
    command = [sys.executable, "-c", blocked, "doctor"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG_S)
    assert ended.returncode == 1 and ended.stderr == f"tilewright: {WITHOUT_PYTORCH}\n"


@pytest.mark.parametrize("verb", ["optimize", "bench", "bisect"])
@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("no-such-compiler", "no C++ compiler: 'no-such-compiler' is not on PATH; install g++ or set CXX"),
        ("broken", "broken failed with exit code 3: error: out of registers"),
    ],
)
def test_what_measures_needs_a_compiler(
    verb: str, compiler: str, message: str, tilewright: Tilewright, models: str, home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    script = home.parent / "broken"
    script.write_text("#!/bin/sh\necho 'error: out of registers' >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script) if compiler == "broken" else compiler)
    ended = tilewright(verb, f"{models}:small")
    assert (ended.code, ended.out) == (6, "") and message in ended.err and ended.err.count("\n") == 1
    assert not list(home.rglob("*.duckdb")) and not list(home.rglob("*.partial"))
    assert verb != "optimize" or tilewright("explain", f"{models}:small", "--on", "cpu").code == 0


def test_a_home_that_cannot_be_written_is_said_before_the_work(
    tilewright: Tilewright, models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_HOME", str(tmp_path / "file" / "home"))
    with monkeypatch.context() as patch:
        patch.setattr("tilewright.hardware.profiles.local_profile", lambda **_: pytest.fail("the work has begun"))
        ended = tilewright("optimize", f"{models}:small")
    assert (ended.code, ended.out) == (9, "")
    assert "cannot write a run in" in ended.err and "set TILEWRIGHT_HOME to a folder that you can write" in ended.err
    assert tilewright("explain", f"{models}:small", "--on", "cpu").code == 0


@pytest.mark.parametrize("fault", ["no folder", "full", "another user's"])
def test_optimize_needs_a_cache(
    fault: str, tilewright: Tilewright, models: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, message = tmp_path / "cache", "cannot use the cache"
    if fault == "no folder":
        (tmp_path / "file").write_text("")
        folder = tmp_path / "file" / "cache"
    elif fault == "full":
        message = "No space left on device"
        monkeypatch.setattr(os, "fsync", no_space)
    else:
        folder.mkdir()
        message = "belongs to another user"
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(folder))
    ended = tilewright("optimize", f"{models}:small")
    assert (ended.code, ended.out) == (7, "") and message in ended.err and "TILEWRIGHT_CACHE" in ended.err
    assert not list(home.rglob("*.duckdb")) and not list(home.rglob("*.partial"))
    assert not folder.exists() or not list(folder.iterdir())
    assert tilewright("explain", f"{models}:small", "--on", "cpu").code == 0


def no_space(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_bench_does_without_a_cache(
    tilewright: Tilewright, models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file" / "cache"))
    # Another test of this process may have compiled the same kernel.
    monkeypatch.setattr(compiler, "_loaded", {})
    ended = tilewright("bench", f"{models}:small", "--impl", "eager,tilewright", "--seconds", "0.1", "--json")
    assert ended.code == 0
    assert "kernels are compiled for this process alone" in ended.err and "TILEWRIGHT_CACHE" in ended.err
    assert [json.loads(line)["impl"] for line in ended.lines] == ["eager", "tilewright"]


def test_a_reader_that_stops_ends_the_command_quietly() -> None:
    """As `tilewright explain --help | head -1` does."""
    command = [sys.executable, "-m", "tilewright", "explain", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(HANG_S) == 0
