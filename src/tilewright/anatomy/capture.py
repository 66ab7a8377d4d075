"""Every Triton launch of a piece of code, seen from inside Triton: kernel, arguments, grid, machine code.

Triton sends every launch, autotuned ones too, through `JITFunction.run`; it is wrapped for as long as
the code runs. So a kernel needs nothing of its own to be looked at.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tilewright.hardware.assembly import disassemble, resources
from tilewright.kernels.eager import launches_in_python
from tilewright.records.errors import TilewrightError, UsageError
from tilewright.records.launch_record import Grid, LaunchRecord, Operand

_WARP = 32


@dataclass(frozen=True)
class Captured:
    """One launch; `arguments` by the kernel's parameters, in order."""

    function: Any
    """The `JITFunction`."""
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]
    """`num_warps`, `num_stages` and the like, as far as they were given."""
    grid: Grid
    grid_of: Callable[[Mapping[str, Any]], Any] | None
    """The launch's own rule from parameters to grid, where it has one."""
    compiled: Any
    """Triton's `CompiledKernel`."""

    @property
    def constants(self) -> dict[str, Any]:
        return {p.name: self.arguments[p.name] for p in self.function.params if p.is_constexpr}

    @property
    def place(self) -> str:
        code = inspect.unwrap(self.function.fn).__code__
        return f"{code.co_filename}:{code.co_firstlineno}"

    def compile(self, **changes: Any) -> Any:
        """The kernel compiled with other constants or options; it is not launched. Triton's errors pass through."""
        arguments = {**self.arguments, **{k: v for k, v in changes.items() if k in self.arguments}}
        options = {**self.options, **{k: v for k, v in changes.items() if k not in self.arguments}}
        return self.function.run(*arguments.values(), grid=(1,), warmup=True, **options)

    def launch(self) -> None:
        """Launch it again with the same arguments; needs the device."""
        self.function.run(*self.arguments.values(), grid=self.grid, warmup=False, **self.options)


@contextlib.contextmanager
def capturing(*, run: bool) -> Iterator[list[Captured]]:
    """Collect the Triton launches of the code inside; without `run` they are compiled and left out.

    UsageError where Triton's interpreter is switched on, as nothing is compiled then.
    """
    import triton
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    if triton.knobs.runtime.interpret:
        raise UsageError("TRITON_INTERPRET=1 keeps Triton from compiling kernels; unset it")
    found: list[Captured] = []
    original = JITFunction.run

    def wrapped(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = original(self, *args, grid=grid, warmup=warmup or not run, **kwargs)
        if not warmup:
            found.append(_captured(self, args, grid, kwargs, compiled))
        return compiled

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", wrapped))
        stack.enter_context(launches_in_python())
        if not run:
            # Configurations cannot be raced without a device: the first that fits is taken.
            stack.enter_context(mock.patch.object(Autotuner, "_bench", lambda self, *args, config, **meta: [0.0]))
        yield found


def _captured(function: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any], compiled: Any) -> Captured:
    names = [parameter.name for parameter in function.params]
    given = inspect.signature(function.fn).bind(*args, **{k: v for k, v in kwargs.items() if k in names})
    given.apply_defaults()
    arguments = dict(given.arguments)
    options = {name: value for name, value in kwargs.items() if name not in names and value is not None}
    size = grid(arguments) if callable(grid) else grid
    x, y, z = (*map(int, size), 1, 1)[:3]
    return Captured(function, arguments, options, (x, y, z), grid if callable(grid) else None, compiled)


def launch_record(captured: Captured, *, measured_us: float | None = None) -> LaunchRecord:
    """The launch as plain data, its machine code disassembled. CompilerError where there is no disassembler."""
    compiled = captured.compiled
    target = compiled.metadata.target
    taken = resources(compiled.asm["cubin"])[compiled.metadata.name]
    constants = captured.constants | {
        name: getattr(compiled.metadata, name) for name in ("num_warps", "num_stages", "num_ctas")
    }
    scalars = {
        name: str(value)
        for name, value in captured.arguments.items()
        if name not in constants and _tensor(value) is None and isinstance(value, int | float | bool)
    }
    return LaunchRecord(
        name=captured.function.fn.__name__,
        language="gluon" if captured.function.is_gluon() else "triton",
        place=shortened(captured.place),
        grid=captured.grid,
        threads=compiled.metadata.num_warps * _WARP,
        capability=f"{target.arch // 10}.{target.arch % 10}",
        registers=taken.registers,
        stack_bytes=taken.stack_bytes,
        # All of it is dynamic; what the code itself states on Hopper is the system's own KiB.
        shared_bytes=compiled.metadata.shared,
        operands=operands(captured),
        scalars=scalars,
        constants={name: _printed(value) for name, value in constants.items()},
        source=inspect.getsource(inspect.unwrap(captured.function.fn)),
        ptx=compiled.asm["ptx"],
        sass=disassemble(compiled.asm["cubin"])[compiled.metadata.name],
        measured_us=measured_us,
    )


def operands(captured: Captured) -> tuple[Operand, ...]:
    """The tensors of a launch; a tensor descriptor counts as the tensor that it describes."""
    pairs = ((name, _tensor(value)) for name, value in captured.arguments.items())
    return tuple(
        Operand(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()))
        for name, tensor in pairs
        if tensor is not None
    )


def _tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    base = getattr(value, "base", None)
    return base if isinstance(base, torch.Tensor) else None


def _printed(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)


def shortened(place: str) -> str:
    """`file.py:12`, relative to the working folder where it lies there."""
    path, _, line = place.rpartition(":")
    try:
        return f"{Path(path).relative_to(Path.cwd())}:{line}"
    except ValueError:
        return place


class NothingCaptured(TilewrightError):
    """The code ran and launched no kernel that can be looked at."""
