"""Python processes that import this checkout, installed or not."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.waiting import HANG_S

ROOT = Path(__file__).parents[1]


def start(
    arguments: Sequence[str], *, path: Sequence[Path] = (), env: Mapping[str, str] | None = None, stdin: bool = False
) -> subprocess.Popen[str]:
    """`python ARGUMENTS` in the root of the checkout, with `path` before its sources."""
    folders = [*map(str, path), str(ROOT / "src"), str(ROOT)]
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **(env or {}), "PYTHONPATH": os.pathsep.join(folders)},
        stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    arguments: Sequence[str], *, path: Sequence[Path] = (), env: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """Output and errors of a process that must succeed."""
    process = start(arguments, path=path, env=env)
    try:
        output, errors = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert process.returncode == 0, output[-20000:] + errors[-5000:]
    return output, errors
