"""Kernels and compiled programs in Triton's interpreter, in a process of their own.

Triton decides when it is first imported whether its library is interpreted, so such a file (not named `test_*`)
cannot share a process with other tests. They share one with each other: its start and its first compilation take as
long as many a file.
"""

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interpreter import ENDED
from tests.processes import start
from tests.waiting import HANG_S

HERE = Path(__file__).parent
FILES = sorted([*HERE.rglob("interpreted*.py"), *(HERE / "kernels" / "interpreted").glob("[!_]*.py")])


class Interpreter:
    """The process, started by the first file, and by the next one where it has died."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def run(self, path: Path) -> tuple[str, str]:
        """What pytest prints of a file, and its exit code; none if the process died."""
        if self.process is None or self.process.poll() is not None:
            environment = {"TRITON_INTERPRET": "1", "TILEWRIGHT_WRITE_SLOW": "0"}
            self.process = start(["-m", "tests.interpreter"], env=environment, stdin=True)
        assert self.process.stdin and self.process.stdout
        limit = threading.Timer(HANG_S, self.process.kill)
        limit.start()
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        lines = []
        for line in self.process.stdout:
            if line.startswith(ENDED):
                break
            lines.append(line)
        else:
            line = ""
        limit.cancel()
        return "".join(lines), line.removeprefix(ENDED).strip()


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    pytest.importorskip("triton")
    made = Interpreter()
    yield made
    if made.process is not None:
        made.process.communicate()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HERE)))
def test_in_the_interpreter(interpreter: Interpreter, path: Path) -> None:
    """All of its tests pass, and none is skipped."""
    output, code = interpreter.run(path)
    assert code == "0" and " passed" in output and "skipped" not in output, output[-25000:]
