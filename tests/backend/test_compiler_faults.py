"""No compiler, one that fails, one that hangs, one that is interrupted: PyTorch runs, with one line that says why."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backend.compiling import assert_same, compiled, differentiate, twin, with_grad
from tests.processes import start
from tests.waiting import HANG_S, until
from tilewright.launch.cxx import compile_to


def new_function() -> Callable[[torch.Tensor], torch.Tensor]:
    """A function whose kernels nobody has compiled before."""
    number = random.random()
    return lambda x: torch.softmax(x * number, -1) + number


def compiler(folder: Path, script: str) -> str:
    """A compiler made of shell commands."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def falls_back(capsys: pytest.CaptureFixture[str]) -> str:
    """Forward and backward run as eager runs them; gives the line that was said."""
    function = new_function()
    x = with_grad(40, 20)
    y = twin(x)
    ours, expected = compiled(function)(x), function(y)
    differentiate(ours)
    differentiate(expected)
    assert_same(ours, expected)
    assert_same(x.grad, y.grad)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tilewright: ")]
    assert len(lines) == 1
    start, _, why = lines[0].partition(" runs as PyTorch runs it: ")
    assert start.startswith("tilewright: the forward and backward graph at test_compiler_faults.py:")
    return why


@pytest.mark.usefixtures("lenient")
class TestFallback:
    def test_no_compiler_on_the_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        assert falls_back(capsys) == "no C++ compiler: 'g++' is not on PATH; install g++ or set CXX"

    def test_another_compiler_that_is_missing(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("CXX", "missing-c++")
        assert "'missing-c++' is not on PATH" in falls_back(capsys)

    def test_a_compiler_that_fails(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = compiler(tmp_path, "cat > /dev/null; echo 'kernel.cpp:7: error: no such thing'; exit 3")
        monkeypatch.setenv("CXX", path)
        assert falls_back(capsys) == f"{path} failed with exit code 3: kernel.cpp:7: error: no such thing"

    def test_a_compiler_that_reads_nothing_and_says_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("CXX", compiler(tmp_path, "exit 1"))
        assert "failed with exit code 1" in falls_back(capsys)

    def test_a_compiler_that_is_no_program(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "compiler"
        path.write_bytes(b"\x7fELF nonsense")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        assert "does not start: Exec format error" in falls_back(capsys)

    def test_a_compiler_that_makes_no_library(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("CXX", compiler(tmp_path, "cat > /dev/null"))
        assert "the compiled library does not load" in falls_back(capsys)

    def test_a_compiler_that_hangs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = compiler(tmp_path, f"sleep 300 & echo $! > {tmp_path}/child; wait")
        monkeypatch.setenv("CXX", path)
        monkeypatch.setenv("TILEWRIGHT_COMPILE_LIMIT", "2")
        why = falls_back(capsys)
        assert why == f"{path} did not finish in 2 s and was stopped; TILEWRIGHT_COMPILE_LIMIT gives it more"
        assert_gone(int((tmp_path / "child").read_text()))

    def test_a_limit_that_is_no_number(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("TILEWRIGHT_COMPILE_LIMIT", "soon")
        assert falls_back(capsys) == "TILEWRIGHT_COMPILE_LIMIT=soon is no number of seconds"

    def test_a_fault_of_our_own(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        def broken(*_: object) -> None:
            raise KeyError("nobody thought of this")

        monkeypatch.setattr("tilewright.backend.assemble", broken)
        assert falls_back(capsys) == "KeyError: 'nobody thought of this'"

    def test_a_rewrite_that_fails_halfway(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def broken(module: torch.fx.GraphModule, *_: object) -> None:
            for node in module.graph.nodes:
                node.args = ()
            raise ValueError("halfway")

        monkeypatch.setattr("tilewright.compile.planner.optimise_module", broken)
        function, x = new_function(), torch.randn(4, 5)
        assert_same(compiled(function)(x), function(x))
        assert "it cannot be traced: ValueError: halfway" in capsys.readouterr().err


def test_strict_makes_it_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "missing-c++")
    with pytest.raises(Exception, match=r"CompilerError: no C\+\+ compiler: 'missing-c\+\+' is not on PATH"):
        compiled(new_function())(torch.randn(4, 5))


def test_an_interrupt_while_the_compiler_starts_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, "exec sleep 300"))
    started: list[subprocess.Popen[str]] = []
    start = subprocess.Popen

    def interrupted(*command: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(start(*command, **options))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr("tilewright.launch.cxx.subprocess.Popen", interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            compile_to(tmp_path / "out.so", "int x;", ())
    finally:
        signal.signal(signal.SIGINT, handler)
    assert started[0].returncode == -signal.SIGKILL


# A shell starts background jobs with SIGINT ignored, and their children inherit that.
INTERRUPTED = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tilewright.runtime.compiler import load
print("compiling", flush=True)
load("int x;" + sys.argv[1])
"""


def test_an_interrupt_leaves_no_entry_and_no_compiler(tmp_path: Path) -> None:
    child = tmp_path / "child"
    path = compiler(tmp_path, f"out=; for a; do out=$a; done; echo half > $out; sleep 300 & echo $! > {child}; wait")
    cache = tmp_path / "cache"
    process = start(["-c", INTERRUPTED, "// 1"], env={"CXX": path, "TILEWRIGHT_CACHE": str(cache)})
    until(lambda: child.exists() and bool(child.read_text().strip()))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=HANG_S)
    assert "KeyboardInterrupt" in errors and process.returncode != 0
    assert [p.name for p in cache.rglob("*") if p.is_file()] == [".lock"]
    assert_gone(int(child.read_text()))


def assert_gone(pid: int) -> None:
    """The process has ended, or is a zombie that only waits for whoever started it."""

    def gone() -> bool:
        try:
            os.kill(pid, 0)
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (ProcessLookupError, FileNotFoundError):
            return True

    until(gone)
