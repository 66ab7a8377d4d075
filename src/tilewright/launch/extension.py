"""Extension modules in C++ against PyTorch's headers, compiled on this machine once for all processes.

A build takes 3 to 25 s. It runs in the background, from when the backend is loaded on a GPU, else from the first call
that could use the module. Until it ends, calls of single operators run in Python, programs on a GPU as PyTorch runs
them, and programs on a CPU in Python or as PyTorch runs them, whichever is faster. `tilewright doctor` builds ahead.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import sysconfig
import threading
from pathlib import Path
from types import ModuleType

import torch

from tilewright.records import cxx
from tilewright.records.errors import CacheError, CompilerError, warn_once

LIBRARIES = ("torch_python", "torch_cpu", "c10")


class Extension:
    """One source file, which defines the module `tilewright_<its stem>`."""

    def __init__(self, source: Path, without: str) -> None:
        """`without`: what the user loses if the build fails; the warning adds the reason."""
        self.source = source
        self.name = f"tilewright_{source.stem}"
        self.found: ModuleType | None = None
        """The module, once it is built."""
        self._without = without
        self._lock = threading.Lock()
        self._building: threading.Thread | None = None

    def module(self) -> ModuleType | None:
        """`found`; the first call starts the build."""
        with self._lock:
            if self._building is None:
                self._building = threading.Thread(target=self._build, name=f"build of {self.name}", daemon=True)
                self._building.start()
        return self.found

    @property
    def is_building(self) -> bool:
        return self._building is not None and self._building.is_alive()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` for the build that `module` started; True if it has succeeded."""
        if self._building is not None:
            self._building.join(seconds)
        return self.found is not None

    def built(self) -> Path:
        """The shared object, from the cache or compiled now. Raises CacheError or CompilerError."""
        folder = self.source.parent
        headers = [path.read_text("utf-8") for path in sorted(folder.glob("*.h"))]
        flags = (*_flags(), f"-I{folder}")
        return cxx.shared_object(self.source.read_text("utf-8"), flags, torch.__version__, sys.version, *headers)

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
            # No warning if the compiler is stopped because the program ends.
            if threading.main_thread().is_alive():
                warn_once(f"{self._without}: {error}")


def _flags() -> tuple[str, ...]:
    """Compiler flags for the headers and libraries of Python and PyTorch. Raises CompilerError without Python.h."""
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        raise CompilerError(f"no Python.h in {python}; install the headers of Python")
    pytorch = Path(torch.__file__).parent
    folders = python, pytorch / "include", pytorch / "include/torch/csrc/api/include"
    return (
        "-O1", "-std=c++20", *(f"-I{folder}" for folder in folders), f"-L{pytorch / 'lib'}",
        *(f"-l{name}" for name in LIBRARIES),
    )  # fmt: skip
