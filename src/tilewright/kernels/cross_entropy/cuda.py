"""Launches of the CUDA C++ kernels: the schedule of the rows follows from metadata alone."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import torch

from tilewright.kernels.row import ELEMENTS, Alignment, alignment_of, layout_of, line_of, vectors_of
from tilewright.kernels.row_schedule import Schedule, short_rows
from tilewright.launch import nvrtc
from tilewright.launch.builder import Operand, RecipeBuilder

SOURCE = Path(__file__).parent / "cuda.cu"
FINISH = Schedule(512, 512, 1)


def forward_schedule(columns: int, itemsize: int, alignment: Alignment) -> Schedule:
    """The schedule for rows of `columns` logits."""
    vectors = vectors_of(columns, itemsize, alignment)
    if vectors <= 128:
        # Vectors with a part of a row take more registers.
        found = Schedule(128, 8, min(4, -(-vectors // 8)), blocks=8 - (alignment != "ALIGNED"), waves=16)
    elif vectors <= 256:
        found = Schedule(128, 16, 4, blocks=8, waves=16)
    elif vectors <= 4096:
        found = Schedule(256, 32, 4, blocks=4, waves=8)
    else:
        found = Schedule(64, 64, 4, blocks=16, waves=4) if vectors <= 8192 else Schedule(256, 256, 4, blocks=4, waves=4)
    return replace(found, storage="stream", alignment=alignment, line=line_of(columns, itemsize))


def backward_schedule(columns: int, itemsize: int, alignment: Alignment) -> Schedule:
    """The schedule for rows of `columns` logits: several short rows per block, or several blocks per long row."""
    vectors = vectors_of(columns, itemsize, alignment)
    found = short_rows(vectors, 2) if vectors <= 64 else Schedule(64, 64, 2 if vectors <= 128 else 4)
    return replace(found, storage="stream", alignment=alignment, line=line_of(columns, itemsize))


def definitions(
    schedule: Schedule, dtype: torch.dtype, smooth: bool, gradient: torch.dtype | None = None
) -> nvrtc.Definitions:
    """The macros that the sources read; `gradient` is the dtype of the loss and of its gradient, if not `dtype`."""
    types = ("ELEMENT", ELEMENTS[dtype]), ("GRADIENT", ELEMENTS[gradient or dtype])
    return (*schedule.definitions(), *types, ("SMOOTH", int(smooth)))


@functools.cache
def _forward(device: int, dtype: torch.dtype, schedule: Schedule, smooth: bool) -> tuple[nvrtc.Kernel, int]:
    """The kernel, and the most blocks to launch."""
    kernel = nvrtc.kernel(
        SOURCE, "forward", "PPPPPqiqqff",
        device=device, threads=schedule.threads, definitions=definitions(schedule, dtype, smooth),
    )  # fmt: skip
    return kernel, schedule.waves * kernel.programs_at_once()


@functools.cache
def _finish(device: int, dtype: torch.dtype) -> nvrtc.Kernel:
    """The kernel that adds up the sums of blocks."""
    return nvrtc.kernel(
        SOURCE, "finish", "PiPPi", device=device, threads=FINISH.threads, definitions=definitions(FINISH, dtype, False)
    )


@functools.cache
def _backward(device: int, dtype: torch.dtype, gradient: torch.dtype, schedule: Schedule, smooth: bool) -> nvrtc.Kernel:
    return nvrtc.kernel(
        SOURCE, "backward", "PPPPPPqiiqqqqff",
        device=device, threads=schedule.threads, definitions=definitions(schedule, dtype, smooth, gradient),
    )  # fmt: skip


def forward(
    call: RecipeBuilder, logits: Operand, target: Operand, ignored: int, smoothing: float, z_loss: float,
    reduction: str, dtype: torch.dtype,
) -> tuple[Operand, Operand, Operand]:  # fmt: skip
    """The loss in `dtype`; each row's maximum and log Σ exp(x - maximum), [2, N]; the weight of one row, [].

    Logits [N, C] with rows at any distance, target [N] contiguous int64.
    """
    rows, columns = logits.shape
    device, layout = logits.device, layout_of(logits)
    schedule = forward_schedule(columns, logits.itemsize, alignment_of(columns, logits.itemsize, (layout,)))
    kernel, most = _forward(device.index, logits.dtype, schedule, smoothing != 0)
    blocks = min(schedule.programs(rows), most)
    statistics = call.empty((2, rows), torch.float32)
    losses = call.empty((rows,), logits.dtype) if reduction == "none" else None
    block_sums = call.empty((blocks, 2), torch.float32)
    call.launch(
        kernel, (blocks,),
        logits, target, losses, statistics, block_sums, rows, columns, layout.stride, ignored, smoothing, z_loss,
    )  # fmt: skip
    total, weight = call.empty((), dtype), call.empty((), torch.float32)
    call.launch(_finish(device.index, dtype), (1,), block_sums, blocks, total, weight, int(reduction == "mean"))
    return losses or total, statistics, weight


def backward(
    call: RecipeBuilder, gradient: Operand, logits: Operand, target: Operand, statistics: Operand, weight: Operand,
    out: Operand, ignored: int, smoothing: float, z_loss: float,
) -> None:  # fmt: skip
    """The gradient of the logits [N, C] into `out`, from that of the loss, [] or [N]."""
    rows, columns = logits.shape
    size, layouts = logits.itemsize, (layout_of(logits), layout_of(out))
    alignment = alignment_of(columns, size, layouts[::-1])
    schedule = backward_schedule(columns, size, alignment)
    pieces = -(-vectors_of(columns, size, alignment) // (schedule.row_threads * schedule.vectors))
    call.launch(
        _backward(logits.device.index, logits.dtype, gradient.dtype, schedule, smoothing != 0),
        (schedule.programs(rows) * pieces,),
        logits, target, statistics, gradient, weight, out, rows, columns, pieces,
        *(layout.stride for layout in layouts), gradient.stride(0) if gradient.dim() else 0, ignored, smoothing, z_loss,
    )  # fmt: skip
