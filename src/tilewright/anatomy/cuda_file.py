"""A user's CUDA C++ kernel, `file.cu:kernel`: compiled by nvcc and disassembled, not launched."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tilewright.anatomy.capture import shortened
from tilewright.hardware.architectures import architecture
from tilewright.hardware.assembly import disassemble, resources
from tilewright.records.errors import CompilerError, TargetError
from tilewright.records.launch_record import Grid, LaunchRecord

_SECONDS = 120


def cuda_file_launch(path: Path, kernel: str, capability: str, grid: Grid, threads: int) -> LaunchRecord:
    """A record of the kernel on `grid` blocks of `threads`, compiled for `capability`.

    Dynamic shared memory is set at the launch and therefore unknown. TargetError for a missing file or kernel,
    CompilerError without nvcc or if it fails.
    """
    if not path.is_file():
        raise TargetError(f"no file {str(path)!r} (looked in {Path.cwd()})")
    target = architecture(capability).target
    virtual = target.replace("sm", "compute")
    cubin = _nvcc(path, "-cubin", f"-gencode=arch={virtual},code={target}")
    codes, taken = disassemble(cubin), resources(cubin)
    mangled = re.compile(rf"{re.escape(kernel)}|_Z\w*?{len(kernel)}{re.escape(kernel)}\w*")
    found = [name for name in codes if mangled.fullmatch(name)]
    if len(found) != 1:
        known = ", ".join(codes) or "none"
        raise TargetError(f"{path} has {len(found)} kernels named {kernel!r}; its kernels: {known}")
    (name,) = found
    source = path.read_text()
    line = next((n for n, text in enumerate(source.splitlines(), 1) if re.search(rf"\b{kernel}\s*\(", text)), 1)
    return LaunchRecord(
        name=kernel,
        language="cuda",
        place=shortened(f"{path.resolve()}:{line}"),
        grid=grid,
        threads=threads,
        capability=capability,
        registers=taken[name].registers,
        stack_bytes=taken[name].stack_bytes,
        shared_bytes=taken[name].own_shared_bytes(capability),
        source=source,
        ptx=_nvcc(path, "-ptx", f"-arch={virtual}").decode(),
        sass=codes[name],
        note="its programs are not drawn: CUDA C++ cannot be interpreted; dynamic shared memory is not counted",
    )


def _nvcc(path: Path, *options: str) -> bytes:
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        raise CompilerError(f"{path.name} needs nvcc, which is neither on PATH nor under /usr/local/cuda/bin")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        done = subprocess.run(
            [nvcc, "-O3", "-std=c++17", *options, "-o", str(out), str(path)],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        if done.returncode:
            raise CompilerError(f"nvcc failed on {path}: {done.stderr.strip()[:2000]}")
        return out.read_bytes()
