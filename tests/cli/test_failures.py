"""Failures: one message on stderr, nothing on stdout, the documented code, nothing left behind."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import Tilewright, at
from tilewright import __version__
from tilewright.runtime import compiler

FAILURES = {
    "no file": (["explain", "missing.py:x"], 3, "no file 'missing.py'"),
    "no name": (["explain", "MODELS:smal"], 3, "has no 'smal'; did you mean small?"),
    "no case": (["explain", "MODELS:number"], 3, "is of type int, not a Case, an nn.Module or a function"),
    "no colon": (["explain", "models"], 2, "is not of the form file.py:NAME"),
    "no inputs": (["explain", "MODELS:gelu"], 2, "is not a case, so it needs --inputs"),
    "bad inputs": (["explain", "MODELS:gelu", "--inputs", "fp33[N=4]"], 2, "input 'fp33[N=4]' has no dtype 'fp33'"),
    "bad size": (["explain", "MODELS:gelu", "--inputs", "fp32[N=x]"], 2, "has 'x' as a size of fp32"),
    "too many inputs": (["explain", "MODELS:gelu", "--inputs", "fp32[4],fp32[4]"], 4, "not the 2 inputs"),
    "no such device": (
        ["explain", "MODELS:small", "--on", "h300"],
        2,
        "no profile of a device named 'h300'; known: h200",
    ),
    "no target": (["explain"], 2, "Missing argument 'target'; `tilewright explain --help` has an example"),
    "no option": (["explain", "MODELS:small", "--fast"], 2, "No such option"),
    "no command": (["explian"], 2, "No such command 'explian'"),
    "tree as json": (["explain", "MODELS:small", "--tree", "--json"], 2, "--tree is for reading"),
    "no implementation": (["bench", "MODELS:small", "--impl", "jax"], 2, "no implementation jax; known: eager"),
    "wrong shapes": (
        ["explain", "MODELS:product", "--inputs", "fp32[N=4,K=6],fp32[N=4,K=6]", "--on", "cpu"],
        4,
        f"{at('return x.relu() @ y')}\n  matmul of [4, 6], [4, 6]: ",
    ),
    "graph break": (
        ["explain", "MODELS:breaks", "--inputs", "fp32[N=4]", "--on", "cpu"],
        5,
        f"it breaks at {at('torch._dynamo.graph_break()')}\n",
    ),
    "data-dependent shape": (
        ["explain", "MODELS:selects", "--inputs", "fp32[N=4]", "--on", "cpu"],
        5,
        f"at {at('return x[x > 0].sin()')}\n",
    ),
    "wrong shapes of optimize": (
        ["optimize", "MODELS:product", "--inputs", "fp32[N=4,K=6],fp32[N=4,K=6]"],
        4,
        "matmul of [4, 6], [4, 6]: ",
    ),
    "a norm of other columns": (
        ["explain", "MODELS:normed", "--inputs", "fp32[N=4,K=6]"],
        4,
        "layer_norm of [4, 6], [8], [8]: Given normalized_shape=[8], expected input with shape [8], but got",
    ),
    "an index too large": (
        ["explain", "MODELS:ninth", "--inputs", "fp32[N=4,K=6]"],
        4,
        "out of bounds for dimension 1",
    ),
    "an axis too many": (["explain", "MODELS:turned", "--inputs", "fp32[N=4,K=6]"], 4, "Dimension out of range"),
    "an assertion": (["explain", "MODELS:asserts", "--inputs", "fp32[N=4,K=6]"], 4, "three channels are needed"),
    "graph break of optimize": (["optimize", "MODELS:breaks", "--inputs", "fp32[N=4]"], 5, "it breaks at models.py:"),
    "no time": (["optimize", "MODELS:small", "--seconds", "-5"], 2, "--seconds -5 is not a time"),
    "a time that is no number": (["optimize", "MODELS:small", "--seconds", "nan"], 2, "--seconds nan is not a time"),
    "a time without an end": (["bench", "softmax", "--seconds", "inf"], 2, "--seconds inf is not a time"),
    "no seconds at all": (["bench", "softmax", "--seconds", "0"], 2, "--seconds 0 is not a time"),
    "no threads": (["kernel", "a.cu:k", "--threads", "0"], 2, "should be greater than or equal to 1"),
    "no run to query": (["sql", "SELECT 1"], 9, "no run in "),
    "no run to report": (["report"], 9, "`tilewright optimize TARGET` makes one"),
    "no such run": (["sql", "SELECT 1", "--run", "missing.duckdb"], 9, "no run at missing.duckdb"),
    "no such run to report": (["report", "--run", "missing.duckdb"], 9, "no run at missing.duckdb"),
}


AS_JSON = ("no file", "no such device", "wrong shapes", "graph break of optimize", "no run to query")
"""Failures of each kind, asked for as JSON, too: there is no half of a document."""


@pytest.mark.parametrize(
    ("name", "flags"), [(name, ()) for name in FAILURES] + [(name, ("--json",)) for name in AS_JSON]
)
def test_a_failure_has_one_message_and_its_code(
    name: str, flags: tuple[str, ...], tilewright: Tilewright, models: str, home: Path
) -> None:
    arguments, code, message = FAILURES[name]
    ended = tilewright(*(argument.replace("MODELS", models) for argument in arguments), *flags)
    assert (ended.code, ended.out) == (code, ""), ended.err
    assert ended.err.startswith("tilewright: ") and message in ended.err
    assert len(ended.err.splitlines()) <= 2 and "Traceback" not in ended.err
    assert not list(home.rglob("*.duckdb")) and not list(home.rglob("*.partial"))


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
