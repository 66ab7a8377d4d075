"""CUDA C++ sources compiled for an H200 by nvcc, for what its assembler says of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tilewright.kernels.nvrtc import HERE, Definitions


def spilled(source: Path, definitions: Definitions) -> dict[str, int]:
    """Bytes of registers that had no room, of each entry point. Skips the test where there is no nvcc."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    with tempfile.TemporaryDirectory() as folder:
        command = ["nvcc", "-gencode=arch=compute_90,code=sm_90", "-std=c++17", "-Xptxas", "-v", "-cubin"]
        command += ["-o", f"{folder}/kernels.cubin", f"-I{HERE}", *(f"-D{name}={value}" for name, value in definitions)]
        done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"entry function '(\w+)'.*?(\d+) bytes spill stores", done.stderr, re.DOTALL)
    assert found, done.stderr
    return {name: int(stores) for name, stores in found}
