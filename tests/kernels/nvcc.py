"""CUDA C++ sources compiled by nvcc, for what its assembler says of them. Skips the test where there is no nvcc."""

import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.waiting import HANG_S
from tilewright.launch.nvrtc import HEADERS, Definitions


@cache
def spilled(source: Path, definitions: Definitions, capability: str = "9.0") -> dict[str, int]:
    """Bytes of registers spilled by each entry point. One compilation tells of all, so equal calls share it."""
    with tempfile.TemporaryDirectory() as folder:
        said = _compiled(source, definitions, Path(folder) / "kernels.cubin", capability)
    found = re.findall(r"entry function '(\w+)'.*?(\d+) bytes spill stores", said, re.DOTALL)
    assert found, said
    return {name: int(stores) for name, stores in found}


def assembled(source: Path, definitions: Definitions) -> dict[str, int]:
    """For the first entry point: registers a thread, bytes spilled, and whether matrix instructions wait for each other
    (0 or 1)."""
    with tempfile.TemporaryDirectory() as folder:
        said = _compiled(source, definitions, Path(folder) / "kernels.cubin", "9.0")
    registers, stores = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers and stores, said
    return {"registers": int(registers[1]), "spilled": int(stores[1]), "serialized": int("serialized" in said)}


def instructions(source: Path, definitions: Definitions) -> list[str]:
    """The machine code, an instruction a line. Skips the test where there is no disassembler, too."""
    triton = pytest.importorskip("triton")
    disassembler = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "kernels.cubin"
        _compiled(source, definitions, code, "9.0")
        text = subprocess.run([disassembler, "-sass", code], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", text, re.MULTILINE)


def _compiled(source: Path, definitions: Definitions, code: Path, capability: str) -> str:
    """nvcc's messages while it writes `code`."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    number = "90a" if capability == "9.0" else capability.replace(".", "")
    target = f"-gencode=arch=compute_{number},code=sm_{number}"
    command = ["nvcc", target, "-std=c++17", "-Xptxas", "-v", "-cubin"]
    command += ["-o", str(code), f"-I{HEADERS}", *(f"-D{name}={value}" for name, value in definitions)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
