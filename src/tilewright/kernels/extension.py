"""C++ against PyTorch's headers, built by the machine's own compiler once for all processes, as an extension module.

That takes 3 to 25 s, so it happens in the background, from the first call on that could use it; whoever waits for
nothing goes on in Python.
"""

from __future__ import annotations

import atexit
import functools
import importlib.machinery
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import torch

from tilewright.records import cache
from tilewright.records.errors import CacheError, CompilerError, say_once

FLAGS = ("-O1", "-std=c++20", "-shared", "-fPIC", "-w")
LIBRARIES = ("torch_python", "torch_cpu", "c10")
LIMIT_S = 300.0
"""A compiler that has not finished by then is stopped."""


class Extension:
    """One source file, whose `PyInit_` is of the name `tilewright_` and its own."""

    def __init__(self, source: Path, without: str) -> None:
        """`without`: what the user is told, before the reason, where it cannot be built."""
        self.source = source
        self.name = f"tilewright_{source.stem}"
        self.found: ModuleType | None = None
        """The module, once it is there."""
        self._without = without
        self._lock = threading.Lock()
        self._building: threading.Thread | None = None

    def module(self) -> ModuleType | None:
        """`found`. The first call starts to build it."""
        with self._lock:
            if self._building is None:
                self._building = threading.Thread(target=self._build, name=f"build of {self.name}", daemon=True)
                self._building.start()
        return self.found

    def wait(self, seconds: float = LIMIT_S) -> bool:
        """Whether what `module` has begun to build is there, after so long at most."""
        if self._building is not None:
            self._building.join(seconds)
        return self.found is not None

    def built(self) -> Path:
        """The shared object, from the cache or compiled now. Raises CacheError or CompilerError."""
        command = _command(self.source)
        compiler = os.stat(os.path.realpath(command[0]))
        versions = torch.__version__, sys.version, f"{compiler.st_size} {compiler.st_mtime_ns}"
        key = cache.key_of(self.source.read_text(), *command, *versions)

        def make(path: Path) -> None:
            _compile([*command, "-o", str(path)])
            cache.seal(path, key)

        for _ in range(2):
            path = cache.build(key, ".so", make)
            if cache.intact(path, key):
                return path
            cache.discard(path)
        raise CacheError(f"the cache entry {path} does not hold what was written to it")

    def load(self, path: Path) -> ModuleType:
        """The module in a shared object."""
        loader = importlib.machinery.ExtensionFileLoader(self.name, str(path))
        spec = importlib.util.spec_from_loader(self.name, loader)
        if spec is None:
            raise ImportError(f"{path} is no extension module")
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module

    def _build(self) -> None:
        try:
            self.found = self.load(self.built())
        except (CacheError, CompilerError, ImportError, OSError) as error:
            say_once(f"{self._without}: {error}")


def _command(source: Path) -> list[str]:
    wanted = os.environ.get("CXX") or "g++"
    compiler = shutil.which(wanted)
    if compiler is None:
        raise CompilerError(f"no C++ compiler: {wanted!r} is not on PATH; install g++ or set CXX")
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        raise CompilerError(f"no Python.h in {python}; install the headers of Python")
    pytorch = Path(torch.__file__).parent
    folders = python, pytorch / "include", pytorch / "include/torch/csrc/api/include"
    return [
        compiler, *FLAGS, *(f"-I{folder}" for folder in folders), str(source), f"-L{pytorch / 'lib'}",
        *(f"-l{name}" for name in LIBRARIES),
    ]  # fmt: skip


def _compile(command: list[str]) -> None:
    # A session of its own, so that the compiler's own children are stopped with it; files, as a pipe could fill.
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        # `unregister` takes every entry of one function, and there may be two compilers.
        stop = atexit.register(functools.partial(_stop, process))
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            _stop(process)
            raise CompilerError(f"{command[0]} did not finish in {LIMIT_S:g} s and was stopped") from None
        finally:
            atexit.unregister(stop)
        if code:
            said.seek(0)
            lines = said.read().splitlines()
            first = next((line for line in lines if "error" in line), *lines[:1] or [""])
            raise CompilerError(f"{command[0]} failed with exit code {code}: {first}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
