"""What some programs of a Triton launch touch, found by running just those in Triton's interpreter.

Run as `python -m tilewright.anatomy.interpreted` with `TRITON_INTERPRET=1`: Triton decides at its first
import whether kernels are interpreted, so this needs a process of its own. It reads a list of launches
as JSON on standard input and prints, for each, a list of walks or an error. Tensors are zeros, whose
pages exist only where a program touches them; pointers that a kernel computes from tensors' values
(indices, page tables) are therefore those of zeros.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

MOST_ACCESSES = 20_000
"""Of one program; a walk that is longer ends there."""


class _Recorder:
    """Stands between the interpreter and memory: notes which elements of which operand a program touches."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.grid: tuple[int, ...] = ()
        self.programs: list[tuple[int, int, int]] = []
        self.walks: list[dict[str, Any]] = []

    def begin(self, tensors: dict[str, torch.Tensor], grid: list[int], programs: list[list[int]]) -> None:
        self.tensors, self.grid = tensors, tuple(grid)
        self.programs = [(x, y, z) for x, y, z in programs]
        self.walks = []

    def install(self) -> None:
        """Into the interpreter of this process, for good: it runs chosen programs and tells what they touch."""
        from triton.runtime import interpreter

        builder = interpreter.InterpreterBuilder
        set_index, set_grid = builder.set_grid_idx, builder.set_grid_dim
        load, store = builder.create_masked_load, builder.create_masked_store
        patch_tensor = interpreter._patch_lang_tensor

        def begin_program(own: Any, x: int, *_: int) -> None:
            self.walks.append({"program": self.programs[x], "accesses": []})
            set_index(own, *self.programs[x])

        def noted_load(own: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            self.note(pointers, mask, "read")
            return load(own, pointers, mask, *rest)

        def noted_store(own: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.note(pointers, mask, "write")
            return store(own, pointers, value, mask, *rest)

        def scalars_as_integers(tensor: Any, scope: Any) -> None:
            patch_tensor(tensor, scope)
            # The interpreter keeps a scalar as an array of one, which NumPy from 2.4 on does not convert.
            scope.set_attr(tensor, "__index__", lambda own: int(own.handle.data.item()))

        builder.set_grid_idx = begin_program
        builder.set_grid_dim = lambda own, *_: set_grid(own, *self.grid)
        builder.create_masked_load = noted_load
        builder.create_masked_store = noted_store
        interpreter._patch_lang_tensor = scalars_as_integers
        # The tensors are the interpreter's own already; copying them back would touch every page.
        interpreter.GridExecutor._restore_args_dev = lambda *_: None

    def note(self, pointers: Any, mask: Any, direction: str) -> None:
        accesses = self.walks[-1]["accesses"]
        if len(accesses) >= MOST_ACCESSES:
            raise RuntimeError(f"a program touches memory more than {MOST_ACCESSES} times")
        addresses = np.asarray(pointers.data).astype(np.int64)
        inside = np.broadcast_to(np.asarray(mask.data).astype(bool), addresses.shape)
        touched = addresses[inside]
        access = {
            "direction": direction,
            "shape": list(addresses.shape),
            "lanes": int(addresses.size),
            "elements": int(touched.size),
        }
        for name, tensor in self.tensors.items():
            start = tensor.data_ptr()
            anywhere = touched if touched.size else addresses
            if start <= anywhere.min() and anywhere.max() < start + _extent(tensor) * tensor.element_size():
                offsets = (touched - start) // tensor.element_size()
                accesses.append(access | {"operand": name, "ranges": _ranges(offsets, tensor)})
                return
        if touched.size:
            # A wrong walk would be worse than none: the kernel reads past what it was given.
            raise RuntimeError("a program touches memory outside the launch's tensors")


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def _ranges(offsets: Any, tensor: torch.Tensor) -> list[tuple[int, int]]:
    """First and last index along each axis, from offsets in elements."""
    if not offsets.size:
        return []
    ranges: dict[int, tuple[int, int]] = {}
    rest = offsets
    for axis in sorted(range(tensor.dim()), key=tensor.stride, reverse=True):
        if tensor.stride(axis) == 0 or tensor.shape[axis] == 1:
            ranges[axis] = (0, tensor.shape[axis] - 1)
            continue
        index = rest // tensor.stride(axis)
        ranges[axis] = (int(index.min()), int(index.max()))
        rest = rest % tensor.stride(axis)
    return [ranges[axis] for axis in range(tensor.dim())]


def walks(launch: dict[str, Any], recorder: _Recorder) -> list[dict[str, Any]]:
    """Run the programs that `launch` names; `tilewright.anatomy.walks` writes its fields."""
    kernel = getattr(_module(launch["module"], Path(launch["file"])), launch["kernel"])
    arguments = {name: _argument(value) for name, value in launch["arguments"].items()}
    based = {name: getattr(value, "base", value) for name, value in arguments.items()}
    tensors = {name: value for name, value in based.items() if isinstance(value, torch.Tensor)}
    recorder.begin(tensors, launch["grid"], launch["programs"])
    kernel[(len(recorder.programs),)](**arguments)
    return recorder.walks


def _argument(value: dict[str, Any]) -> Any:
    kind = value["kind"]
    if kind == "tensor":
        return _zeros(value)
    if kind == "descriptor":
        from triton.tools.tensor_descriptor import TensorDescriptor

        base = _zeros(value)
        return TensorDescriptor(base, list(value["shape"]), list(value["strides"]), list(value["block"]))
    if kind == "dtype":
        import triton.language as tl

        return getattr(tl, value["value"])
    return value["value"]


def _zeros(value: dict[str, Any]) -> torch.Tensor:
    shape, strides = value["shape"], value["strides"]
    elements = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    storage = torch.zeros(max(elements, 1), dtype=getattr(torch, value["dtype"]))
    return storage.as_strided(shape, strides)


def _module(name: str, file: Path) -> ModuleType:
    """By name where that finds this very file, else from the file, as a script's own module."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin == str(file):
        return importlib.import_module(name)
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location("looked_at", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["looked_at"] = module
    spec.loader.exec_module(module)
    return module


def main(launches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each launch its walks, or the reason why it cannot be followed."""
    recorder = _Recorder()
    recorder.install()
    answers: list[dict[str, Any]] = []
    for launch in launches:
        try:
            answers.append({"walks": walks(launch, recorder)})
        except Exception as error:  # a kernel may do anything, and the other launches are still to be followed
            # The interpreter wraps what the kernel raised.
            answers.append({"error": str(error.__cause__ or error) or type(error).__name__})
    return answers


if __name__ == "__main__":
    found = main(json.load(sys.stdin))
    print("\n" + json.dumps(found))
