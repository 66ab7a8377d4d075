"""Records the memory accesses of some programs of a Triton launch by running them in Triton's interpreter.

Run as `python -m tilewright.anatomy.interpreted` with `TRITON_INTERPRET=1`, in a separate process, because Triton
decides at import whether kernels are interpreted. It reads a list of launches as JSON on standard input and prints,
for each, a list of walks (the accesses of one program, in order) or an error. Tensors are zeros, and the system maps
their pages only when they are accessed; pointers that a kernel computes from tensor values (indices, page tables)
are therefore those for zeros.
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
"""Per program; a program with more accesses is an error."""


class _Recorder:
    """Wraps the interpreter's loads and stores: records which elements of which operand a program accesses."""

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
        """Patch the interpreter of this process: it runs chosen programs and records their accesses."""
        from triton.runtime import interpreter

        builder = interpreter.InterpreterBuilder
        set_index, set_grid = builder.set_grid_idx, builder.set_grid_dim
        load, store = builder.create_masked_load, builder.create_masked_store
        patch_tensor = interpreter._patch_lang_tensor

        def begin_program(builder: Any, x: int, *_: int) -> None:
            self.walks.append({"program": self.programs[x], "accesses": []})
            set_index(builder, *self.programs[x])

        def recorded_load(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            self.record(pointers, mask, "read")
            return load(builder, pointers, mask, *rest)

        def recorded_store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.record(pointers, mask, "write")
            return store(builder, pointers, value, mask, *rest)

        def scalars_as_integers(tensor: Any, scope: Any) -> None:
            patch_tensor(tensor, scope)
            # The interpreter's scalars are arrays of one element, which NumPy does not convert from 2.4 on.
            scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

        builder.set_grid_idx = begin_program
        builder.set_grid_dim = lambda builder, *_: set_grid(builder, *self.grid)
        builder.create_masked_load = recorded_load
        builder.create_masked_store = recorded_store
        interpreter._patch_lang_tensor = scalars_as_integers
        # The tensors are already on the host; copying them back would map every page.
        interpreter.GridExecutor._restore_args_dev = lambda *_: None

    def record(self, pointers: Any, mask: Any, direction: str) -> None:
        accesses = self.walks[-1]["accesses"]
        if len(accesses) >= MOST_ACCESSES:
            raise RuntimeError(f"a program accesses memory more than {MOST_ACCESSES} times")
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
            raise RuntimeError("a program accesses memory outside the launch's tensors")


def _extent(tensor: torch.Tensor) -> int:
    """Elements of storage from the first to the last element."""
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
    """Run the programs that `launch` names; `tilewright.anatomy.program_accesses` writes its fields."""
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
    """The module imported by name if that finds this file, else loaded from the file."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin == str(file):
        return importlib.import_module(name)
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location("interpreted_file", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["interpreted_file"] = module
    spec.loader.exec_module(module)
    return module


def main(launches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each launch its walks, or the reason why it could not be interpreted."""
    recorder = _Recorder()
    recorder.install()
    answers: list[dict[str, Any]] = []
    for launch in launches:
        try:
            answers.append({"walks": walks(launch, recorder)})
        except Exception as error:  # a kernel may raise anything; the other launches still run
            # The interpreter wraps the kernel's exception.
            answers.append({"error": str(error.__cause__ or error) or type(error).__name__})
    return answers


if __name__ == "__main__":
    found = main(json.load(sys.stdin))
    print("\n" + json.dumps(found))
