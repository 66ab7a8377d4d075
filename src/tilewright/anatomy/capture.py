"""Captures the launches of a piece of code: kernel, arguments or definitions, grid, machine code.

Launches of tilewright's CUDA C++ kernels, and those of Triton. Every Triton launch, autotuned ones included, calls
`JITFunction.run`, which is wrapped while the code runs. So kernels need no changes to be captured.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tilewright.hardware.architectures import architecture
from tilewright.hardware.assembly import Resources, disassemble, resources
from tilewright.hardware.occupancy import occupancy
from tilewright.launch import nvrtc, twin
from tilewright.launch.eager import launches_in_python
from tilewright.records.errors import TilewrightError, UsageError
from tilewright.records.launch_record import Grid, LaunchRecord, Operand
from tilewright.records.recipe import Launch

_WARP = 32


@dataclass(frozen=True)
class TritonLaunch:
    """One Triton launch; `arguments` by parameter name, in the kernel's order."""

    function: Any
    """The `JITFunction`."""
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]
    """`num_warps`, `num_stages` and other options that the launch set."""
    grid: Grid
    grid_of: Callable[[Mapping[str, Any]], Any] | None
    """The launch's function from parameters to grid, if the grid was a function."""
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
        """Compile the kernel with other constants or options, without launching it. Triton's errors pass through."""
        arguments = {**self.arguments, **{k: v for k, v in changes.items() if k in self.arguments}}
        options = {**self.options, **{k: v for k, v in changes.items() if k not in self.arguments}}
        return self.function.run(*arguments.values(), grid=(1,), warmup=True, **options)

    def launch(self) -> None:
        """Launch the kernel again with the same arguments, on the device."""
        self.function.run(*self.arguments.values(), grid=self.grid, warmup=False, **self.options)


@contextlib.contextmanager
def capturing(*, run: bool) -> Iterator[list[TritonLaunch]]:
    """Collect the Triton launches of the code inside; without `run` kernels are compiled but not launched.

    UsageError if Triton's interpreter is on, because nothing is compiled then.
    """
    import triton
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    if triton.knobs.runtime.interpret:
        raise UsageError("TRITON_INTERPRET=1 keeps Triton from compiling kernels; unset it")
    found: list[TritonLaunch] = []
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
            # Without a device configurations cannot be timed; equal times select the first.
            stack.enter_context(mock.patch.object(Autotuner, "_bench", lambda self, *args, config, **meta: [0.0]))
        yield found


def _captured(function: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any], compiled: Any) -> TritonLaunch:
    names = [parameter.name for parameter in function.params]
    given = inspect.signature(function.fn).bind(*args, **{k: v for k, v in kwargs.items() if k in names})
    given.apply_defaults()
    arguments = dict(given.arguments)
    options = {name: value for name, value in kwargs.items() if name not in names and value is not None}
    size = grid(arguments) if callable(grid) else grid
    x, y, z = (*map(int, size), 1, 1)[:3]
    return TritonLaunch(function, arguments, options, (x, y, z), grid if callable(grid) else None, compiled)


def launch_record(captured: TritonLaunch, *, measured_us: float | None = None, sass: bool = True) -> LaunchRecord:
    """The launch as plain data, disassembled (0.4 s) if `sass`. CompilerError without the tools that read the code."""
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
        # Triton's shared memory is all dynamic; the static size in a Hopper cubin is the system's KiB.
        shared_bytes=compiled.metadata.shared,
        operands=operands(captured),
        scalars=scalars,
        constants={name: getattr(value, "__name__", None) or str(value) for name, value in constants.items()},
        source=inspect.getsource(inspect.unwrap(captured.function.fn)),
        ptx=compiled.asm["ptx"],
        sass=disassemble(compiled.asm["cubin"])[compiled.metadata.name] if sass else "",
        measured_us=measured_us,
    )


def operands(captured: TritonLaunch) -> tuple[Operand, ...]:
    """The tensors of a launch; for a tensor descriptor, the tensor that it describes."""
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


def shortened(place: str) -> str:
    """`file.py:12`, relative to the working folder if it is inside."""
    path, _, line = place.rpartition(":")
    try:
        return f"{Path(path).relative_to(Path.cwd())}:{line}"
    except ValueError:
        return place


class NothingCaptured(TilewrightError):
    """The code launched no kernel that can be captured."""


@dataclass(frozen=True)
class BuiltKernel:
    """The source and options of a kernel, and its machine code."""

    source: Path
    entry: str
    definitions: nvrtc.Definitions
    cluster: int
    capability: str

    @functools.cached_property
    def cubin(self) -> bytes:
        return nvrtc.cubin(self.source, architecture(self.capability).target, self.definitions)

    @functools.cached_property
    def resources(self) -> Resources:
        return resources(self.cubin)[self.entry]

    @functools.cached_property
    def sass(self) -> str:
        return disassemble(self.cubin)[self.entry]


_BUILT: dict[int, tuple[nvrtc.Kernel, BuiltKernel]] = {}
"""Every kernel built during a capture, by id; the reference keeps the id from being reused."""


class _CompiledOnly(nvrtc.Kernel):
    """A kernel compiled for an absent device; its resources are read from the machine code."""

    built: BuiltKernel

    def registers(self) -> int:
        return self.built.resources.registers

    def blocks_per_multiprocessor(self) -> int:
        sm = architecture(self.built.capability)
        return occupancy(sm, self.threads, self.registers(), self.shared_bytes).blocks


@contextlib.contextmanager
def capturing_cuda(capability: str, *, run: bool) -> Iterator[list[LaunchRecord]]:
    """Collect the CUDA C++ launches of the code inside; without `run` they are only compiled, for `capability`.

    Kernels built before are not captured. Launchers cache kernels, so a process that captured without `run` must not
    run those kernels afterwards.
    """
    found: list[LaunchRecord] = []
    build, launch = nvrtc.kernel, twin.launch

    def building(source: Path, entry: str, signature: str, **options: Any) -> nvrtc.Kernel:
        built = BuiltKernel(source, entry, options.get("definitions", ()), options.get("cluster", 1), capability)
        if run:
            kernel = build(source, entry, signature, **options)
        else:
            threads, shared_bytes = options["threads"], options.get("shared_bytes", 0)
            kernel = _CompiledOnly(entry, None, signature, options["device"], threads, shared_bytes, built.cluster)
            kernel.built = built
        _BUILT[id(kernel)] = (kernel, built)
        return kernel

    def launching(name: str, device: int, action: Launch, *rest: Any) -> None:
        if id(action.kernel) in _BUILT:
            launched = _record(*_BUILT[id(action.kernel)], action.grid)
            if launched not in found:
                found.append(launched)
        if run:
            launch(name, device, action, *rest)

    with (
        launches_in_python(),
        mock.patch.object(nvrtc, "kernel", building),
        mock.patch.object(twin, "launch", launching),
    ):
        yield found


def _record(kernel: nvrtc.Kernel, built: BuiltKernel, grid: tuple[int, int, int]) -> LaunchRecord:
    taken = built.resources
    constants = {name: str(value) for name, value in built.definitions} | {"cluster": str(built.cluster)}
    return LaunchRecord(
        name=built.entry,
        language="cuda",
        place=shortened(f"{built.source}:1"),
        grid=grid,
        threads=kernel.threads,
        capability=built.capability,
        registers=taken.registers,
        stack_bytes=taken.stack_bytes,
        shared_bytes=kernel.shared_bytes + taken.own_shared_bytes(built.capability),
        constants=constants,
        source=built.source.read_text(),
        sass=built.sass,
        note="its programs are not drawn: CUDA C++ cannot be interpreted; NVRTC wrote machine code, not PTX",
    )
