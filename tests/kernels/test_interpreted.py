"""Hand-written Triton kernels in Triton's interpreter, each operator's file in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_interpreted

FILES = sorted(path for path in (Path(__file__).parent / "interpreted").glob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels_in_the_interpreter(path: Path) -> None:
    pytest.importorskip("triton")
    run_interpreted(path)


def test_there_are_files() -> None:
    assert FILES
