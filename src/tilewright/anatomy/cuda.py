"""Captures launches of tilewright's CUDA C++ kernels: source, definitions, grid, machine code."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tilewright.anatomy.capture import shortened
from tilewright.hardware.architectures import architecture
from tilewright.hardware.assembly import Resources, disassemble, resources
from tilewright.hardware.occupancy import occupancy
from tilewright.launch import nvrtc, twin
from tilewright.launch.eager import launches_in_python
from tilewright.records.launch_record import LaunchRecord
from tilewright.records.recipe import Launch


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
