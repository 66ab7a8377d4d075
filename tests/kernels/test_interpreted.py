"""Hand-written Triton kernels in Triton's interpreter, each operator's file in a process of its own.

Triton decides when it is first imported whether its library is interpreted, so those files (not named
`test_*`) cannot share a process with other tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = sorted(path for path in (HERE / "interpreted").glob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels_in_the_interpreter(path: Path) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore:::triton", "-W", "ignore:::numpy"]
    command = [sys.executable, "-m", "pytest", *options, str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_there_are_files() -> None:
    assert FILES
