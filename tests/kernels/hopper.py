"""CUDA C++ compiled ahead for an H200 by nvcc, for what its assembler reports."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tilewright.launch.nvrtc import HEADERS


def assembled(source: Path, definitions: tuple[tuple[str, int], ...], folder: Path) -> dict[str, int]:
    """Registers a thread, bytes spilled, and whether matrix instructions wait for each other (0 or 1).

    Skips the test where there is no nvcc.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("there is no nvcc here")
    settings = [f"-D{name}={value}" for name, value in definitions]
    target = ["-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v", "-o", str(folder / "out.cubin")]
    done = subprocess.run([nvcc, *target, f"-I{HEADERS}", *settings, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = done.stdout + done.stderr
    registers, spilled = re.search(r"Used (\d+) registers", report), re.search(r"(\d+) bytes spill stores", report)
    assert registers and spilled, report
    return {"registers": int(registers[1]), "spilled": int(spilled[1]), "serialized": int("serialized" in report)}


def instructions(folder: Path) -> list[str]:
    """The machine code that `assembled` left in the folder, an instruction a line. Skips where Triton has no
    disassembler."""
    triton = pytest.importorskip("triton")
    disassembler = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
    done = subprocess.run([disassembler, "-sass", folder / "out.cubin"], capture_output=True, text=True, check=True)
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", done.stdout, re.MULTILINE)
