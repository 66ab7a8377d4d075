"""Every test starts with nothing said, may choose to fall back, and to have a compiler of its own."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tilewright.records import errors


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_warned", set())


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fall back with a line, as users have it; the other tests run strict."""
    monkeypatch.delenv("TILEWRIGHT_STRICT", raising=False)


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """The lines of tilewright's on stderr since it was last asked."""
    return lambda: [line for line in capsys.readouterr().err.splitlines() if line.startswith("tilewright: ")]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Makes a shell script the C++ compiler; gives its path."""

    def use(script: str) -> str:
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return str(path)

    return use


@pytest.fixture
def compilations(tmp_path: Path, compiler: Callable[[str], str]) -> Path:
    """A file that gets a line for each run of the C++ compiler."""
    calls = tmp_path / "calls"
    calls.touch()
    compiler(f'echo x >> {calls}\nexec g++ "$@"')
    return calls
