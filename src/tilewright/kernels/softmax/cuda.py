"""The CUDA C++ softmax kernels: their schedules, from metadata and the device's limits, and their launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from tilewright.hardware.architectures import DeviceLimits, limits_of
from tilewright.kernels.device import interpreted
from tilewright.kernels.row import ELEMENTS, VECTOR, RowLayout, alignment_of, layout_of, line_of, vectors_of
from tilewright.kernels.row_schedule import Schedule, blocks_for, no_kernel
from tilewright.launch import nvrtc
from tilewright.launch.builder import Operand, RecipeBuilder

Direction = Literal["forward", "backward"]
SOURCE = Path(__file__).parent / "registers.cu"
SIGNATURES = {"forward": "PPqiqq", "backward": "PPPqiqqq"}
LONGEST_GENERATED = 16 * 1024
"""Bytes of a row up to which generated kernels are as fast."""
STEPS = {
    "forward": (
        (2048, 256, 1),
        (4096, 512, 1),
        (8192, 256, 4),
        (16384, 256, 8),
        (65536, 256, 16),
        (98304, 1024, 8),
        (131072, 1024, 16),
    ),
    "backward": ((2048, 512, 1), (4096, 512, 2), (8192, 512, 4), (16384, 512, 8), (32768, 512, 8), (65536, 512, 16)),
}
"""(The most vectors of a row, threads of a block, blocks of a cluster): the fastest of those measured on an H200."""


def schedule_of(
    direction: Direction,
    columns: int,
    dtype: torch.dtype,
    layouts: Sequence[RowLayout],
    log: bool,
    limits: DeviceLimits,
) -> Schedule:
    """The schedule for tensors of these layouts, the written one first; `log` for log-softmax."""
    size = dtype.itemsize
    alignment = alignment_of(columns, size, layouts)
    found = _registers(direction, vectors_of(columns, size, alignment), log, limits)
    return replace(found, alignment=alignment, line=line_of(columns, size))


def longest(direction: Direction, limits: DeviceLimits) -> int:
    """Bytes of the longest row that a cluster holds; longer ones are generated."""
    return _steps(direction, limits)[-1][0] * VECTOR


def takes(direction: Direction, x: Operand) -> bool:
    """Whether these kernels compute rows like those of x."""
    if not x.numel() or not x.is_cuda or interpreted() or x.dtype not in ELEMENTS or no_kernel(x.device):
        return False
    nbytes = x.shape[-1] * x.itemsize if x.dim() else 0
    return LONGEST_GENERATED < nbytes <= longest(direction, limits_of(x.device))


def _steps(direction: Direction, limits: DeviceLimits) -> list[tuple[int, int, int]]:
    return [step for step in STEPS[direction] if step[2] <= limits.largest_cluster]


def _registers(direction: Direction, vectors: int, log: bool, limits: DeviceLimits) -> Schedule:
    """The schedule for rows of so many 16-byte vectors; an unaligned longest row has a few more than its step says."""
    steps = _steps(direction, limits)
    _, threads, cluster = next((step for step in steps if vectors <= step[0]), steps[-1])
    found = Schedule(threads, threads, -(-vectors // (threads * cluster)), cluster)
    return replace(found, blocks=_blocks(found, 1 if direction == "forward" else 2, log))


def _blocks(schedule: Schedule, tensors: int, log: bool) -> int:
    """As `blocks_for`, but more blocks in a cluster, to hide the time in which its blocks wait for each other: 48
    registers a thread for up to 28 of a softmax's data, 80 for more than 32 (64 that begin off a line spill)."""
    threads, vectors = schedule.threads, schedule.vectors
    if schedule.cluster > 1 and tensors == 1:
        if vectors <= 7 and not log:
            return 1280 // threads
        if vectors > 8:
            return max(1, 768 // threads)
    return blocks_for(threads, vectors * 4 * tensors)


@functools.cache
def _kernel(direction: Direction, device: int, dtype: torch.dtype, log: bool, schedule: Schedule) -> nvrtc.Kernel:
    return nvrtc.kernel(
        SOURCE, direction, SIGNATURES[direction], device=device, threads=schedule.threads, cluster=schedule.cluster,
        definitions=(*schedule.definitions(), ("ELEMENT", ELEMENTS[dtype]), ("LOG", int(log))),
    )  # fmt: skip


def forward(call: RecipeBuilder, x: Operand, y: Operand, log: bool) -> None:
    """Softmax (or its logarithm) of the rows of `x` into those of `y`: [N, M] each, rows at any distance."""
    _launch(call, "forward", (x, y), log)


def backward(call: RecipeBuilder, y: Operand, dy: Operand, dx: Operand, log: bool) -> None:
    """The gradient of the rows whose result is `y` into `dx`, from that of the result, `dy`: [N, M] each."""
    _launch(call, "backward", (y, dy, dx), log)


def _launch(call: RecipeBuilder, direction: Direction, tensors: tuple[Operand, ...], log: bool) -> None:
    first, layouts = tensors[0], tuple(map(layout_of, tensors))
    rows, columns = first.shape
    schedule = schedule_of(direction, columns, first.dtype, layouts[::-1], log, limits_of(first.device))
    kernel = _kernel(direction, first.device.index, first.dtype, log, schedule)
    strides = (layout.stride for layout in layouts)
    call.launch(kernel, (schedule.programs(rows) * schedule.cluster,), *tensors, rows, columns, *strides)
