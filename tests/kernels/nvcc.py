"""CUDA C++ sources compiled by nvcc, for what its assembler says of them. Skips the test where there is no nvcc."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.waiting import HANG_S
from tilewright.launch.nvrtc import HEADERS, Definitions


class Build(NamedTuple):
    """A cubin, and what nvcc said while it made it."""

    said: str
    code: bytes

    @property
    def spilled(self) -> dict[str, int]:
        """Bytes of registers spilled by each entry point."""
        found = re.findall(r"entry function '(\w+)'.*?(\d+) bytes spill stores", self.said, re.DOTALL)
        assert found, self.said
        return {name: int(stores) for name, stores in found}

    @property
    def registers(self) -> int:
        """Of a thread, for the first entry point."""
        found = re.search(r"Used (\d+) registers", self.said)
        assert found, self.said
        return int(found[1])

    @property
    def serialized(self) -> bool:
        """Whether matrix instructions wait for each other."""
        return "serialized" in self.said

    def instructions(self) -> list[str]:
        """The machine code, an instruction a line. Skips the test where there is no disassembler."""
        triton = pytest.importorskip("triton")
        disassembler = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.code)
            file.flush()
            text = subprocess.run([disassembler, "-sass", file.name], capture_output=True, text=True, check=True).stdout
        return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", text, re.MULTILINE)


def build(source: Path, definitions: Definitions, capability: str = "9.0", entry: str = "") -> Build:
    """All entry points of a source, or machine code for `entry` alone."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    number = "90a" if capability == "9.0" else capability.replace(".", "")
    target = f"-gencode=arch=compute_{number},code=sm_{number}"
    command = ["nvcc", target, "-std=c++17", "-Xptxas", f"-v,--entry,{entry}" if entry else "-v", "-cubin"]
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "kernels.cubin"
        command += ["-o", str(code), f"-I{HEADERS}", *(f"-D{name}={value}" for name, value in definitions)]
        done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stderr
        return Build(done.stdout + done.stderr, code.read_bytes())
