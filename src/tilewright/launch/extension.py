"""C++ against PyTorch's headers, built by the machine's own compiler once for all processes, as an extension module.

That takes 3 to 25 s, so it happens in the background, from the first call on that could use it; until then calls run in
Python.
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

from tilewright.launch import cxx
from tilewright.records.errors import CacheError, CompilerError, warn_once

LIBRARIES = ("torch_python", "torch_cpu", "c10")


class Extension:
    """One source file, whose `PyInit_` is of the name `tilewright_` and its own."""

    def __init__(self, source: Path, without: str) -> None:
        """`without`: the consequence for the user if it cannot be built; the warning adds the reason."""
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

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the build that `module` began, at most so long; whether it has succeeded."""
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
    """Where the headers and libraries of Python and PyTorch are. Raises CompilerError without Python's."""
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        raise CompilerError(f"no Python.h in {python}; install the headers of Python")
    pytorch = Path(torch.__file__).parent
    folders = python, pytorch / "include", pytorch / "include/torch/csrc/api/include"
    return (
        "-O1", "-std=c++20", *(f"-I{folder}" for folder in folders), f"-L{pytorch / 'lib'}",
        *(f"-l{name}" for name in LIBRARIES),
    )  # fmt: skip
