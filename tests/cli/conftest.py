"""A home, a user's file, and the command line in this process."""

import sys
from pathlib import Path

import pytest
import torch

from tests.cli.commands import MODELS, Ended, Tilewright
from tilewright import cli
from tilewright.hardware import profiles


@pytest.fixture
def home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a cache of the test's own, ceilings that need no measuring, and no GPU, here or in children."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # pytest-xdist sets the width of a terminal, which piped output follows.
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(profiles, "local_profile", lambda **_: profiles.profile_for("cpu"))
    return home


@pytest.fixture
def models(tmp_path: Path) -> str:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return str(path)


@pytest.fixture
def tilewright(home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Tilewright:
    """Run one command in this process, through the very entry point that the shell calls."""

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["tilewright", *arguments])
        capfd.readouterr()
        code: object = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capfd.readouterr()
        assert isinstance(code, int)
        return Ended(code, out, err)

    return run
