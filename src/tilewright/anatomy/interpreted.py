"""Records the memory accesses of some programs of a Triton launch by running them in Triton's interpreter.

Run as `python -m tilewright.anatomy.interpreted FILE` with `TRITON_INTERPRET=1`, in a separate process, because Triton
decides at import whether kernels are interpreted. FILE, a pickle, has a list of `InterpretedLaunch`; it gets, for each,
the accesses of its programs or an error. Tensors are zeros, and the system maps their pages only when they are
accessed; pointers that a kernel computes from tensor values (indices, page tables) are therefore those for zeros.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Literal

import numpy as np
import torch

from tilewright.records.launch_record import Access, Grid, ProgramAccesses, Range
from tilewright.records.recipe import Layout

MOST_ACCESSES = 20_000
"""Per program; a program with more accesses is an error."""


@dataclass(frozen=True)
class Described:
    """A tensor descriptor."""

    base: Layout
    block: Sequence[int]


@dataclass(frozen=True)
class InterpretedLaunch:
    """A launch to interpret; tensors among the arguments are layouts, tensor descriptors are `Described`."""

    module: str
    file: str
    kernel: str
    arguments: Mapping[str, Any]
    grid: Grid
    programs: Sequence[Grid]


class _Recorder:
    """Wraps the interpreter's loads and stores: records which elements of which operand a program accesses."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.grid: tuple[int, ...] = ()
        self.programs: Sequence[Grid] = []
        self.walks: list[list[Access]] = []
        self.kernel: Any = None

    def begin(self, kernel: Any, tensors: dict[str, torch.Tensor], grid: Grid, programs: Sequence[Grid]) -> None:
        self.kernel, self.tensors = inspect.unwrap(kernel.fn).__code__, tensors
        self.grid, self.programs, self.walks = grid, programs, []

    def install(self) -> None:
        """Patch the interpreter of this process: it runs chosen programs and records their accesses."""
        from triton.runtime import interpreter

        builder = interpreter.InterpreterBuilder
        set_index, set_grid = builder.set_grid_idx, builder.set_grid_dim
        load, store = builder.create_masked_load, builder.create_masked_store
        patch_tensor = interpreter._patch_lang_tensor

        def begin_program(builder: Any, x: int, *_: int) -> None:
            self.walks.append([])
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

    def record(self, pointers: Any, mask: Any, direction: Literal["read", "write"]) -> None:
        accesses = self.walks[-1]
        if len(accesses) >= MOST_ACCESSES:
            raise RuntimeError(f"a program accesses memory more than {MOST_ACCESSES} times")
        addresses = np.asarray(pointers.data).astype(np.int64)
        inside = np.broadcast_to(np.asarray(mask.data).astype(bool), addresses.shape)
        touched = addresses[inside]
        for name, tensor in self.tensors.items():
            start = tensor.data_ptr()
            anywhere = touched if touched.size else addresses
            if start <= anywhere.min() and anywhere.max() < start + _extent(tensor) * tensor.element_size():
                offsets = (touched - start) // tensor.element_size()
                counts = int(touched.size), int(addresses.size)
                ends = (int(offsets.min()), int(offsets.max())) if offsets.size else (0, 0)
                ranges = _ranges(offsets, tensor)
                accesses.append(Access(name, direction, ranges, *counts, addresses.shape, ends, self._line()))
                return
        if touched.size:
            raise RuntimeError("a program accesses memory outside the launch's tensors")

    def _line(self) -> int:
        """The line of the kernel that runs, also within a function that it calls."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            code = frame.f_code
            if (code.co_filename, code.co_name) == (self.kernel.co_filename, self.kernel.co_name):
                return frame.f_lineno - int(self.kernel.co_firstlineno) + 1
            frame = frame.f_back
        return 0


def _extent(tensor: torch.Tensor) -> int:
    """Elements of storage from the first to the last element."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def _ranges(offsets: Any, tensor: torch.Tensor) -> tuple[Range, ...]:
    """First and last index along each axis, from offsets in elements."""
    if not offsets.size:
        return ()
    ranges: dict[int, Range] = {}
    rest = offsets
    for axis in sorted(range(tensor.dim()), key=tensor.stride, reverse=True):
        if tensor.stride(axis) == 0 or tensor.shape[axis] == 1:
            ranges[axis] = (0, tensor.shape[axis] - 1)
            continue
        index = rest // tensor.stride(axis)
        ranges[axis] = (int(index.min()), int(index.max()))
        rest = rest % tensor.stride(axis)
    return tuple(ranges[axis] for axis in range(tensor.dim()))


def walks(launch: InterpretedLaunch, recorder: _Recorder) -> tuple[ProgramAccesses, ...]:
    """Run the programs that `launch` names."""
    kernel = getattr(_module(launch.module, Path(launch.file)), launch.kernel)
    arguments = {name: _with_memory(value) for name, value in launch.arguments.items()}
    based = {name: getattr(value, "base", value) for name, value in arguments.items()}
    tensors = {name: value for name, value in based.items() if isinstance(value, torch.Tensor)}
    recorder.begin(kernel, tensors, launch.grid, launch.programs)
    kernel[(len(recorder.programs),)](**arguments)
    pairs = zip(launch.programs, recorder.walks, strict=True)
    return tuple(ProgramAccesses(program, tuple(accesses)) for program, accesses in pairs)


def _with_memory(value: Any) -> Any:
    """Zeros for a layout, and a descriptor of such zeros."""
    if isinstance(value, Layout):
        return torch.zeros(max(value.extent, 1), dtype=value.dtype).as_strided(value.shape, value.strides)
    if isinstance(value, Described):
        from triton.tools.tensor_descriptor import TensorDescriptor

        base = value.base
        return TensorDescriptor(_with_memory(base), list(base.shape), list(base.strides), list(value.block))
    return value


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


def main(launches: Sequence[InterpretedLaunch]) -> list[tuple[ProgramAccesses, ...] | str]:
    """For each launch its programs' accesses, or the reason why it could not be interpreted."""
    recorder = _Recorder()
    recorder.install()
    answers: list[tuple[ProgramAccesses, ...] | str] = []
    for launch in launches:
        try:
            answers.append(walks(launch, recorder))
        except Exception as error:  # a kernel may raise anything; the other launches still run
            # The interpreter wraps the kernel's exception.
            answers.append(str(error.__cause__ or error) or type(error).__name__)
    return answers


if __name__ == "__main__":
    # The classes are those of the module that the pickle names.
    from tilewright.anatomy import interpreted

    file = Path(sys.argv[1])
    file.write_bytes(pickle.dumps(interpreted.main(pickle.loads(file.read_bytes()))))
