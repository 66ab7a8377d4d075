"""The CUDA C++ kernels (`held.cu`, `streamed.cu`, `backward.cu`, `columns.cu`): what they take, and their launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tilewright.kernels import nvrtc, ring
from tilewright.kernels.norm import geometry, wide
from tilewright.kernels.norm.geometry import Direction, Held, Streamed
from tilewright.kernels.norm.operands import Operands, pointer, stride
from tilewright.kernels.ring import VECTOR, Ring
from tilewright.kernels.row import ELEMENTS, Edges, edges, line_of, vectors_of

HERE = Path(__file__).parent
COLUMN_WARPS = (2, 4, 8, 16)


def refusal(direction: Direction, matrices: Sequence[Tensor], weights: int, weight_dtype: torch.dtype) -> str | None:
    """Why the kernels cannot take these inputs [rows, columns] of one dtype, or None; `weights` are read beside."""
    x, lie = matrices[0], edges(*matrices)
    tensors = [(matrix.data_ptr(), matrix.shape[0], matrix.stride(0)) for matrix in matrices]
    why = _unfit(x.device.index, direction, x.shape[1], x.dtype, len(matrices), weights, weight_dtype, lie)
    if why or (direction == "forward" and geometry.held(vectors_of(x.shape[1], x.itemsize, lie))):
        return why
    return None if ring.alike(x.shape[1], tensors, x.itemsize) else "rows do not lie within 16 bytes as the result's do"


def unfit(
    device: int,
    direction: Direction,
    columns: int,
    dtype: torch.dtype,
    inputs: int,
    weights: int,
    weight_dtype: torch.dtype,
) -> str | None:
    """Why the kernels cannot take contiguous rows of that length on that device, or None."""
    lie: Edges = "RAGGED" if columns * dtype.itemsize % line_of(columns, dtype.itemsize) else "WHOLE"
    return _unfit(device, direction, columns, dtype, inputs, weights, weight_dtype, lie)


def _unfit(
    device: int,
    direction: Direction,
    columns: int,
    dtype: torch.dtype,
    inputs: int,
    weights: int,
    weight_dtype: torch.dtype,
    lie: Edges,
) -> str | None:
    if dtype not in ELEMENTS:
        return f"{dtype} has no CUDA C++ kernel"
    if not nvrtc.available(device):
        return "needs the package cuda-bindings and a device with clusters"
    size, weight_size = dtype.itemsize, weight_dtype.itemsize
    found: Held | Streamed | Ring | None
    if direction == "forward":
        found = geometry.held(vectors_of(columns, size, lie))
        found = found or geometry.streamed(columns, size, lie != "WHOLE", weights, weight_size, inputs > 1)
    else:
        task = geometry.task_of(columns, size, inputs, weights, weight_size, True)
        found = ring.plan(task, geometry.ways_of(columns, size, 2))
    return None if found else f"no cluster holds rows of {columns} columns"


@dataclass(frozen=True)
class Build:
    """What the sources are compiled for, beside a plan."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    has_weight: bool
    has_bias: bool
    centered: bool
    residual: bool
    lie: Edges
    line: int
    aligned: bool
    """Whether weight and bias begin on 16 bytes."""
    alike: bool = True
    """Of streamed rows, whether all that a program takes begin alike within a line."""

    def definitions(self) -> nvrtc.Definitions:
        """What the sources want to know."""
        return (
            ("ELEMENT", ELEMENTS[self.dtype]),
            ("WEIGHT", ELEMENTS[self.weight_dtype]),
            ("EDGES", self.lie),
            ("LINE", self.line),
            ("ALIGNED", int(self.aligned)),
            ("CENTERED", int(self.centered)),
            ("HAS_WEIGHT", int(self.has_weight)),
            ("HAS_BIAS", int(self.has_bias)),
            ("RESIDUAL", int(self.residual)),
            ("ALIKE", int(self.alike)),
        )


Plan = Held | Streamed | Ring
Source = Literal["held", "streamed", "backward"]


def plan(source: Source, columns: int, build: Build) -> Plan:
    """How a kernel of `source`.cu shares out rows of so many columns."""
    size, weight_size = build.dtype.itemsize, build.weight_dtype.itemsize
    sums = build.has_weight + build.has_bias
    chosen: Plan | None
    if source == "held":
        chosen = geometry.held(vectors_of(columns, size, build.lie))
    elif source == "streamed":
        chosen = geometry.streamed(columns, size, build.lie == "RAGGED", sums, weight_size, build.residual)
    else:
        task = geometry.task_of(columns, size, 2 + build.residual, int(build.has_weight), weight_size, build.centered)
        chosen = ring.plan(task, geometry.ways_of(columns, size, sums))
    assert chosen is not None, "refusal() answers for every direction"
    return chosen


SIGNATURES = {
    "held": "PPPPPPPPqiqqf",
    "streamed": "PPPPPPPPqiqqif",
    "backward": "PPPPPPPPqiqqq",
}


@functools.cache
def _kernel(source: Source, device: int, columns: int, build: Build) -> tuple[nvrtc.Kernel, Plan, int]:
    """The kernel, its plan, and the programs that run at once."""
    chosen = plan(source, columns, build)
    kernel = nvrtc.kernel(
        HERE / f"{source}.cu",
        f"norm_{source}",
        SIGNATURES[source],
        device=device,
        threads=chosen.threads,
        shared_bytes=chosen.shared_bytes,
        cluster=chosen.cluster,
        definitions=(*chosen.definitions(), *build.definitions()),
    )
    return kernel, chosen, kernel.programs_at_once()


def _aligned(*weights: Tensor | None) -> bool:
    return all(weight is None or weight.data_ptr() % VECTOR == 0 for weight in weights)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """y, x + residual (None without one), mean (empty unless `centered`) and rstd, of matrices [rows, columns]."""
    rows, columns = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(y)
    mean = torch.empty(rows if centered else 0, dtype=torch.float32, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    lie = edges(*(matrix for matrix in (x, residual, y, total) if matrix is not None))
    build = Build(
        x.dtype, x.dtype if weight is None else weight.dtype, weight is not None, bias is not None, centered,
        residual is not None, lie, line_of(columns, x.itemsize), _aligned(weight, bias),
    )  # fmt: skip
    arguments = (
        x.data_ptr(), pointer(residual), y.data_ptr(), pointer(total), pointer(weight), pointer(bias),
        mean.data_ptr(), rstd.data_ptr(), rows, columns, stride(x), stride(residual),
    )  # fmt: skip
    if geometry.held(vectors_of(columns, x.itemsize, lie)):
        kernel, chosen, _ = _kernel("held", x.device.index, columns, build)
        kernel((-(-rows // chosen.groups),), *arguments, eps)
    else:
        kernel, chosen, at_once = _kernel("streamed", x.device.index, columns, build)
        programs, period = geometry.streams(at_once, rows, stride(x) * x.itemsize)
        if period > 1:
            kernel, _, _ = _kernel("streamed", x.device.index, columns, replace(build, alike=False))
        kernel((programs * chosen.cluster,), *arguments, period, eps)
    return y, total, mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    dsum: Tensor | None,
    weight: Tensor | None,
    has_bias: bool,
    mean: Tensor,
    rstd: Tensor,
    centered: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx (plus `dsum`), dweight and dbias, of matrices [rows, columns]."""
    columns = x.shape[1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dtype = x.dtype if weight is None else weight.dtype
    lie = edges(*(matrix for matrix in (x, dy, dsum, dx) if matrix is not None), line=VECTOR)
    build = Build(
        x.dtype, dtype, weight is not None, has_bias, centered, dsum is not None, lie, VECTOR, _aligned(weight)
    )
    sums = (weight is not None) + has_bias
    inputs, weight_size = 2 + (dsum is not None), 0 if weight is None else weight.itemsize
    operands = Operands(x, dy, dsum, dx, weight, mean, rstd)
    spread = wide.plan(columns, x.itemsize, inputs, weight_size, sums)
    if spread:
        partial, heads = wide.launch(spread, build.definitions(), operands, sums)
    else:
        partial, heads = _launch_rings(build, operands, sums), None
    gradients = [torch.empty(columns, dtype=dtype, device=x.device) for _ in range(sums)]
    if sums:
        _, slots, pitch = partial.shape
        _columns(x.device.index, dtype, slots)(
            (-(-columns // 32), sums), partial.data_ptr(), pointer(heads), gradients[0].data_ptr(),
            gradients[-1].data_ptr(), slots, columns, pitch,
        )  # fmt: skip
    return dx, gradients[0] if weight is not None else None, gradients[-1] if has_bias else None


def _launch_rings(build: Build, operands: Operands, sums: int) -> Tensor:
    """dx by `backward.cu`, and what the programs found for each column: fp32 [sums, programs, columns]."""
    x = operands.x
    rows, columns = x.shape
    strides = operands.strides()
    kernel, chosen, at_once = _kernel("backward", x.device.index, columns, build)
    period = ring.period_of(strides[0] * x.itemsize)
    programs = ring.programs_of(at_once, -(-rows // chosen.groups), chosen.groups, period)
    partial = torch.empty((sums, programs, columns), dtype=torch.float32, device=x.device)
    kernel((programs * chosen.cluster,), *operands.pointers(), partial.data_ptr(), rows, columns, *strides)
    return partial


@functools.cache
def _columns(device: int, dtype: torch.dtype, programs: int) -> nvrtc.Kernel:
    """The sum over `programs`: more warps share a column where there are more to add, about sixteen each."""
    warps = next((warps for warps in COLUMN_WARPS if warps * 16 >= programs), COLUMN_WARPS[-1])
    return nvrtc.kernel(
        HERE / "columns.cu",
        "norm_columns",
        "PPPPiii",
        device=device,
        threads=warps * 32,
        definitions=(("WEIGHT", ELEMENTS[dtype]), ("THREADS", warps * 32)),
    )
