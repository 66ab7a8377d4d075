"""Implementations that every suite makes alike: compiled ones, libraries that may be missing, and examples."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tilewright.case_names import EXAMPLES
from tilewright.records.sources import GENERATED
from tilewright.records.suite import Language, Variant, Workload

DISTRIBUTIONS = {
    "liger_kernel": "liger-kernel",
    "quack": "quack-kernels",
    "flash_attn": "flash-attn-4",
    "cudnn": "nvidia-cudnn-frontend",
}
"""The peers' distributions by the package that is imported."""
_EXAMPLES = "tilewright_examples"
"""The name under which they are imported, whatever else is called `examples`."""


def inductor(function: Callable[..., Any], **options: Any) -> Variant:
    """`function` under `torch.compile` with static shapes, compiled at its first call."""
    import torch

    return Variant("inductor", "inductor", torch.compile(function, dynamic=False), **options)


def generated(function: Callable[..., Any], **options: Any) -> Variant:
    """`function`, written in plain PyTorch, under `torch.compile(backend="tilewright")` without hand-written kernels.

    A hand-written kernel is worth its lines where it is 5 % faster.
    """

    @functools.cache
    def compiled() -> Callable[..., Any]:
        import torch

        from tilewright.backend import backend

        return torch.compile(function, backend=backend, dynamic=False, options={"hand_written": False})

    return Variant("generated", "inductor", lambda *inputs: compiled()(*inputs), sources=GENERATED, **options)


def library(name: str, target: str, call: Callable[..., Any], **options: Any) -> Variant:
    """A peer, refused where its package is not installed.

    `call(found, *inputs)` calls what `target` (`quack.softmax:softmax`) names, which is imported then.
    """
    package = re.split("[.:]", target)[0]

    def refuses(_: Workload) -> str | None:
        return None if importlib.util.find_spec(package) else f"{DISTRIBUTIONS[package]} is not installed"

    def run(*inputs: Any) -> Any:
        return call(pkgutil.resolve_name(target), *inputs)

    return Variant(name, "library", run, refuses=refuses, package=DISTRIBUTIONS[package], **options)


def example(
    name: str,
    language: Language,
    target: str,
    note: str = "",
    *,
    refuses: Callable[[Workload], str | None] = lambda _: None,
    **options: Any,
) -> Variant:
    """An implementation that teaches: the function `target` (`kernels/gelu.py:gelu`) of `examples/`.

    In CUDA C++ it is refused where that cannot be built.
    """
    file, _, function = target.partition(":")

    def reason(workload: Workload) -> str | None:
        return (no_cuda_cpp(workload) if language == "cuda" else None) or refuses(workload)

    return Variant(
        name,
        language,
        lambda *inputs: getattr(example_module(file), function)(*inputs),
        note,
        refuses=reason,
        **options,
    )


@functools.cache
def example_module(file: str) -> ModuleType:
    """The module `examples/<file>`."""
    if _EXAMPLES not in sys.modules:
        sys.modules[_EXAMPLES] = package = ModuleType(_EXAMPLES)
        package.__path__ = [str(EXAMPLES)]
    return importlib.import_module(".".join([_EXAMPLES, *Path(file).with_suffix("").parts]))


def no_cuda_cpp(_: Workload) -> str | None:
    """Why CUDA C++ cannot be built for the current device, or None."""
    import torch

    from tilewright.launch import nvrtc

    if torch.cuda.is_available() and nvrtc.available(torch.cuda.current_device()):
        return None
    return "CUDA C++ needs the package cuda-bindings and a GPU with thread-block clusters"
