"""Kernels and compiled programs in Triton's interpreter, each file in a process of its own.

Triton decides when it is first imported whether its library is interpreted, so such a file (not named `test_*`)
cannot share a process with other tests.
"""

from pathlib import Path

import pytest

from tests.processes import run

HERE = Path(__file__).parent
FILES = sorted([*HERE.rglob("interpreted*.py"), *(HERE / "kernels" / "interpreted").glob("[!_]*.py")])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HERE)))
def test_in_the_interpreter(path: Path) -> None:
    """All of its tests pass, and none is skipped."""
    pytest.importorskip("triton")
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no", str(path)]
    output, _ = run(command, env={"TRITON_INTERPRET": "1", "TILEWRIGHT_WRITE_SLOW": "0"})
    assert " passed" in output and "skipped" not in output
