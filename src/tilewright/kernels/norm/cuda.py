"""The launches of the CUDA C++ kernels; `schedule.py` decides how."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from tilewright.hardware.architectures import limits_of
from tilewright.kernels import ring
from tilewright.kernels.norm.schedule import (
    BackwardOperands,
    Direction,
    ForwardOperands,
    NormCall,
    helper_warps,
    schedule_of,
)
from tilewright.kernels.row import VECTOR, RowLayout, layout_of, period_of
from tilewright.kernels.row_schedule import Schedule, no_kernel
from tilewright.launch import nvrtc
from tilewright.launch.builder import Operand, RecipeBuilder

HERE = Path(__file__).parent
SOURCES = {
    ("forward", "registers"): ("registers.cu", "norm_registers", "PPPPPPPPqiqqf"),
    ("backward", "ring"): ("backward.cu", "norm_backward", "PPPPPPPPqiqqq"),
    ("backward", "tma"): ("backward_tma.cu", "norm_backward_tma", "PPPPPPPPqiqqq"),
}
"""By direction and storage: file, entry point, types of its parameters."""


def refusal(call: NormCall, device: torch.device) -> str | None:
    """Why the kernels cannot take a call on a GPU, or None."""
    if why := no_kernel(device):
        return why
    found = schedule_of(call, limits_of(device))
    return found if isinstance(found, str) else None


def call_of(
    direction: Direction, matrices: Sequence[Operand], weights: Sequence[Operand | None], has_bias: bool, centered: bool
) -> NormCall:
    """The metadata of a call: matrices [rows, columns] with adjacent columns, `weights` [columns] that it reads."""
    x, weight = matrices[0], weights[0]
    aligned = all(each is None or each.data_ptr() % VECTOR == 0 for each in weights)
    kind = None if weight is None else weight.dtype
    return NormCall(direction, x.shape[1], x.dtype, tuple(map(layout_of, matrices)), kind, has_bias, centered, aligned)


def contiguous(
    direction: Direction, rows: int, columns: int, dtype: torch.dtype, inputs: int, weights: int, centered: bool
) -> NormCall:
    """The same of contiguous matrices, with weights of their dtype."""
    layouts = (RowLayout(0, rows, columns),) * inputs
    return NormCall(direction, columns, dtype, layouts, dtype if weights else None, weights > 1, centered)


@functools.cache
def _kernel(
    device: int, direction: Direction, schedule: Schedule, definitions: nvrtc.Definitions
) -> tuple[nvrtc.Kernel, int]:
    """The kernel, and the programs that run at once."""
    source, entry, signature = SOURCES[direction, schedule.storage]
    helpers = helper_warps(schedule.cluster) if schedule.storage == "tma" else 0
    kernel = nvrtc.kernel(
        HERE / source, entry, signature, device=device, threads=schedule.threads + 32 * helpers,
        shared_bytes=schedule.shared_bytes, cluster=schedule.cluster,
        definitions=(*schedule.definitions(), *definitions),
    )  # fmt: skip
    return kernel, kernel.programs_at_once()


def _scheduled(call: NormCall, device: torch.device) -> Schedule:
    found = schedule_of(call, limits_of(device))
    if isinstance(found, str):
        raise NotImplementedError(f"the CUDA C++ norms cannot take this call: {found}")
    return found


def forward(build: RecipeBuilder, operands: ForwardOperands) -> None:
    """The launch that fills y, total, mean and rstd."""
    x, residual, weight, bias, y, total, mean, rstd, eps, centered = operands
    matrices = (x,) if residual is None else (x, residual)
    call = call_of("forward", matrices, (weight, bias), bias is not None, centered)
    schedule = _scheduled(call, x.device)
    rows, columns = x.shape
    strides = [layout.stride for layout in call.inputs] + [0] * (2 - len(matrices))
    arguments = (x, residual, y, total, weight, bias, mean if centered else None, rstd, rows, columns, *strides)
    kernel, _ = _kernel(x.device.index, "forward", schedule, call.definitions())
    build.launch(kernel, (schedule.programs(rows),), *arguments, eps)


def backward(build: RecipeBuilder, operands: BackwardOperands) -> None:
    """The launches that fill the gradients."""
    dy, x, dsum, weight, mean, rstd, dx, d_weight, d_bias, centered = operands
    matrices = (x, dy) if dsum is None else (x, dy, dsum)
    call = call_of("backward", matrices, (weight,), d_bias.numel() > 0, centered)
    schedule = _scheduled(call, x.device)
    kernel, at_once = _kernel(x.device.index, "backward", schedule, call.definitions())
    rows, columns = x.shape
    strides = [layout.stride for layout in call.inputs] + [0] * (3 - len(matrices))
    # Each program leaves its sums over rows.
    programs = ring.programs_of(
        at_once, schedule.programs(rows), schedule.rows_per_block, period_of(strides[0] * x.itemsize)
    )
    partial = build.empty((call.weights, programs, columns), torch.float32) if call.weights else None
    build.launch(
        kernel, (programs * schedule.cluster,),
        x, dy, dsum, dx, weight, mean if centered else None, rstd, partial, rows, columns, *strides,
    )  # fmt: skip
    if partial is not None:
        # Imported here, since Triton exists on Linux alone.
        from tilewright.kernels.column_sums import add_parts

        add_parts(build, partial, *(each for each in (d_weight, d_bias) if each.numel()))
