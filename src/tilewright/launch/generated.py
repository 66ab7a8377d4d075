"""Generated Triton kernels: loads them from source, compiles them for a GPU, and launches them.

If `TRITON_INTERPRET=1` is set before Triton is first imported (in tests), they run on CPU tensors, one program after
another.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any

import torch

from tilewright.emit.scheduled_nest import ScheduledNest
from tilewright.emit.triton_step import in_memory
from tilewright.launch.triton import POINTERS_LAST, is_interpreted, loaded
from tilewright.loops.nest import Nest
from tilewright.records import cache
from tilewright.records.errors import CompilerError, KernelError
from tilewright.records.progress import tell
from tilewright.records.recipe import Argument, Launch, Layout, Number, Pointer, Recipe
from tilewright.schedule.choose import neighbours, schedule_of
from tilewright.schedule.schedule import Schedule
from tilewright.schedule.tiles import Limits

ALIGNED = 16
"""Bytes. Triton compiles a kernel again for pointers that are not multiples of this."""
COMPILING = min(16, os.cpu_count() or 1)
"""How many kernels are compiled at a time."""
INTERPRETED_TILE = 16384
"""The interpreter's time depends on the number of programs and operations, hardly on elements."""
LEAST_SHARED_BYTES = 48 * 1024
"""Shared memory available to every program; PyTorch does not report the limit of AMD GPUs."""


class TritonKernel:
    """The kernel of one nest.

    Raises CompilerError if Triton is missing or rejects the source, CacheError if the source cannot be written to disk,
    where Triton reads it.
    """

    def __init__(self, nest: Nest, source: str, sizes: Sequence[float] = ()) -> None:
        self.nest = nest
        self.sizes = sizes
        self.source = source
        module = _module(source)
        self.main = getattr(module, nest.name)
        self.after = getattr(module, f"{nest.name}_after", None)
        self._schedules: dict[torch.device, Schedule] = {}
        self._compiled: dict[torch.device, list[tuple[Any, int]]] = {}
        """By device: the compiled main kernel and the one after it, if any, each with its number of programs."""
        self._submitted: dict[torch.device, list[tuple[Any, int]]] = {}

    def schedule(self, device: torch.device) -> Schedule:
        """The schedule of a launch on `device`."""
        if device not in self._schedules:
            self._schedules[device] = schedule_of(self.nest, _limits(device))
        return self._schedules[device]

    def neighbours(self, device: torch.device) -> dict[str, Schedule]:
        """The schedule on `device` and others of the same source, by their text."""
        return neighbours(self.nest, _limits(device))

    def numbers(self, chosen: Schedule, skips: Sequence[int] = ()) -> list[float]:
        """The numbers of a launch, which follow its buffers; `skips` are the nest's (`Lowered.numbers`)."""
        scheduled, sizes = ScheduledNest(self.nest, chosen), chosen.sizes | chosen.combining_sizes
        return [scheduled.count, *skips, *self.sizes, *(sizes.get(name, 1) for name in scheduled.passed)]

    def compile(self, device: torch.device) -> None:
        """Compile for `device` now, not at the first launch. Raises KernelError."""
        if device.type == "cuda" and device not in self._compiled and not is_interpreted():
            self.submit(device)
            self.finish(device)

    def submit(self, device: torch.device) -> None:
        """Compile for `device`; in Triton's `AsyncCompileMode` only start to. `finish` waits for the result."""
        chosen = self.schedule(device)
        stored = [in_memory(b.dtype) for b in self.nest.buffers]
        dtypes = [getattr(torch, d) for d in (*stored, *(d for _, d in chosen.scratch))]
        given = [*dtypes, *self.numbers(chosen, [0] * self.nest.numbers)]
        with self._named_failure(), torch.cuda.device(device):
            self._submitted[device] = self._run(chosen, given, lambda kernel, _: partial(kernel.warmup, grid=(1,)))

    def finish(self, device: torch.device) -> None:
        with self._named_failure():
            found = self._submitted.pop(device)
            # Triton returns the kernel instead of a future if it is already compiled.
            self._compiled[device] = [(k.result() if hasattr(k, "result") else k, programs) for k, programs in found]

    def is_compiled(self, device: torch.device) -> bool:
        return device in self._compiled

    @contextlib.contextmanager
    def _named_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Triton, LLVM and ptxas each raise their own
            raise KernelError(self.nest.name, f"Triton failed on {self.nest.name}: {error}") from error

    def launch(
        self, tensors: Sequence[torch.Tensor], chosen: Schedule | None = None, numbers: Sequence[int] = ()
    ) -> None:
        """Run for these tensors (one for each buffer of the nest, in order, all on one device) and numbers."""
        device = tensors[-1].device
        if device.type != "cuda" and not is_interpreted():
            raise CompilerError("CPU tensors need TRITON_INTERPRET=1 set before Triton is first imported")
        chosen = chosen or self.schedule(device)
        scratch = [torch.empty(n, dtype=getattr(torch, d), device=device) for n, d in chosen.scratch]
        stored = [t.view(getattr(torch, in_memory(b.dtype))) for t, b in zip(tensors, self.nest.buffers, strict=True)]
        given = [*stored, *scratch, *self.numbers(chosen, numbers)]
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self._run(chosen, given, lambda kernel, programs: kernel[(programs,)])

    def recipe(self, device: torch.device, results: Sequence[Layout], numbers: Sequence[int] = ()) -> Recipe | None:
        """The recipe of a launch with pointers at multiples of `ALIGNED`; None if Triton must launch the kernel.

        Its inputs are the nest's inputs; `results` has the layouts of the outputs, `numbers` the launch's numbers.
        """
        if device not in self._compiled:
            return None
        chosen = self.schedule(device)
        with torch.cuda.device(device):
            kernels = [(loaded(compiled), programs) for compiled, programs in self._compiled[device]]
        scratch = [Layout((n,), (1,), getattr(torch, d), device) for n, d in chosen.scratch]
        pointers = [Pointer(i) for i in range(len(self.nest.inputs) + len(results) + len(scratch))]
        given = [Number("d" if isinstance(x, float) else "q", x) for x in self.numbers(chosen, numbers)]
        arguments: tuple[Argument, ...] = (*pointers, *given, *[Number("P", 0)] * POINTERS_LAST)
        launches = [Launch(kernel, (programs, 1, 1), arguments) for kernel, programs in kernels if kernel]
        if len(launches) < len(kernels):
            return None
        residues = (0,) * len(self.nest.inputs)
        buffers = (*results, *scratch)
        return Recipe(self.nest.name, device, residues, ALIGNED, buffers, tuple(range(len(results))), launches)

    def _run(
        self, chosen: Schedule, arguments: Sequence[object], on: Callable[[Any, int], Callable[..., object]]
    ) -> list[tuple[Any, int]]:
        """Call `on(kernel, programs)` with the arguments of each kernel; returns its results and the programs."""
        launches = self.launches(chosen)
        return [(on(kernel, programs)(*arguments, **options), programs) for kernel, programs, options in launches]

    def launches(self, chosen: Schedule) -> Iterator[tuple[Any, int, dict[str, Any]]]:
        """Each kernel with its number of programs, and its constants and options."""
        scheduled, after = ScheduledNest(self.nest, chosen), chosen.combination
        calls = [(self.main, chosen.programs, chosen.sizes, chosen.warps)]
        if after is not None:
            calls.append((self.after, after.programs, chosen.combining_sizes, after.warps))
        for kernel, programs, sizes, warps in calls:
            options = {n: sizes[n] for n in kernel.arg_names if n in sizes and n not in scheduled.passed}
            options |= {"num_warps": warps, "enable_fp_fusion": scheduled.allows_fma}
            if "libdevice." in self.source:
                # Keep subnormals, as eager's kernels do.
                options["enable_reflect_ftz"] = False
            if self.nest.checks:
                # Triton drops assertions from kernels that are not compiled for debugging.
                options |= {"debug": True, "sanitize_overflow": False}
            yield kernel, programs, options


def _limits(device: torch.device) -> Limits:
    if device.type != "cuda":
        return Limits(2, INTERPRETED_TILE)
    found = torch.cuda.get_device_properties(device)
    most = getattr(found, "shared_memory_per_block_optin", LEAST_SHARED_BYTES)
    return Limits.of(found.multi_processor_count, most)


@functools.cache
def kernel_of(nest: Nest, source: str) -> TritonKernel:
    """The kernel of a nest, shared by all regions and graphs with this nest."""
    return TritonKernel(nest, source)


def compile_together(wanted: Sequence[tuple[TritonKernel, torch.device]]) -> None:
    """Compile kernels for their devices in parallel; `TritonKernel.compile` later reports those that fail.

    Only LLVM and ptxas run in parallel: Triton's own passes hold the interpreter's lock.
    """
    missing = [(kernel, device) for kernel, device in dict.fromkeys(wanted) if not kernel.is_compiled(device)]
    if not missing or is_interpreted():
        return
    from triton import AsyncCompileMode

    with ThreadPoolExecutor(COMPILING) as pool:
        with AsyncCompileMode(pool, ignore_errors=True):
            for kernel, device in missing:
                with contextlib.suppress(KernelError):
                    kernel.submit(device)
        for number, (kernel, device) in enumerate(missing):
            tell("kernels compiled", number, len(missing))
            with contextlib.suppress(KernelError):
                kernel.finish(device)


@functools.cache
def _module(source: str) -> ModuleType:
    """The module of `source`, imported from a file in the cache; a damaged file is rewritten."""
    if importlib.util.find_spec("triton") is None:
        raise CompilerError("Triton is not installed")
    key = cache.key_of(source)
    path = cache.build(key, ".py", lambda out: out.write_text(source))
    if path.read_text() != source:
        cache.discard(path)
        path = cache.build(key, ".py", lambda out: out.write_text(source))
    spec = importlib.util.spec_from_file_location(f"tilewright_kernel_{key}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
