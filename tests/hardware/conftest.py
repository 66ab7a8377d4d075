"""A Triton kernel compiled without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compiled_copy(tmp_path_factory: pytest.TempPathFactory) -> dict[int, bytes]:
    """Architecture (90, 80) → cubin of `copy_kernel.py`, compiled where no interpreter is asked for."""
    folder = tmp_path_factory.mktemp("cubin")
    script = Path(__file__).with_name("copy_kernel.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, str(script), str(folder), "80", "90"], check=True, env=environment)
    return {architecture: (folder / f"{architecture}.cubin").read_bytes() for architecture in (80, 90)}
