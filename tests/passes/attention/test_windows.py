"""Windows' attention, recognised in a graph for a GPU."""

from __future__ import annotations

from pathlib import Path

from tests.processes import run_interpreted


def test_windows_in_the_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("interpreted_windows.py"))
