"""The CUDA C++ norms: which kernel takes a call and how it shares out the rows, from metadata alone; the launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from tilewright.hardware.architectures import DeviceLimits, limits_of
from tilewright.kernels.row import ELEMENTS, LINE, VECTOR, RowLayout, alignment_of, layout_of, line_of, vectors_of
from tilewright.kernels.row_schedule import CLUSTERS, Schedule, blocks_for, no_kernel, room_of
from tilewright.launch import nvrtc
from tilewright.launch.builder import Operand, RecipeBuilder

Direction = Literal["forward", "backward"]
HERE = Path(__file__).parent
LONGEST_GENERATED = 2 * 1024
"""Bytes of a row up to which generated kernels are as fast."""
SOURCES = {
    ("forward", "registers"): ("registers.cu", "norm_registers", "PPPPPPPPqiqqf"),
    ("backward", "tma"): ("backward_tma.cu", "norm_backward_tma", "PPPPPPPPqiqqq"),
}
"""By direction and storage: file, entry point, types of its parameters."""


@dataclass(frozen=True)
class NormCall:
    """All of a call that a schedule depends on."""

    direction: Direction
    columns: int
    dtype: torch.dtype
    inputs: tuple[RowLayout, ...]
    """Forward x and residual, backward x, dy and dsum; the last may be missing."""
    weight_dtype: torch.dtype | None
    """None without a weight."""
    has_bias: bool
    centered: bool
    """Layer norm; else RMS norm."""
    weights_aligned: bool = True
    """Whether weight and bias begin on 16 bytes."""

    @property
    def residual(self) -> bool:
        """Whether a third matrix is read beside x and dy, or a second beside x."""
        return len(self.inputs) == (2 if self.direction == "forward" else 3)

    @property
    def weights(self) -> int:
        """Vectors over the columns: weight and bias forward, sums over rows backward."""
        return (self.weight_dtype is not None) + self.has_bias

    @property
    def weight_vector_bytes(self) -> int:
        """Bytes of the weights that belong to one vector of x; 0 without a weight."""
        return 0 if self.weight_dtype is None else self.weight_dtype.itemsize * VECTOR // self.dtype.itemsize

    def definitions(self) -> tuple[tuple[str, int | str], ...]:
        """The macros that the sources read beside those of a schedule."""
        return (
            ("ELEMENT", ELEMENTS[self.dtype]),
            ("WEIGHT", ELEMENTS[self.weight_dtype or self.dtype]),
            ("WEIGHTS_ALIGNED", int(self.weights_aligned)),
            ("CENTERED", int(self.centered)),
            ("HAS_WEIGHT", int(self.weight_dtype is not None)),
            ("HAS_BIAS", int(self.has_bias)),
            ("RESIDUAL", int(self.residual)),
        )


@functools.lru_cache(1024)
def schedule_of(call: NormCall, limits: DeviceLimits) -> Schedule | str:
    """The schedule, or why no CUDA C++ kernel takes the call."""
    if call.dtype not in ELEMENTS:
        return f"{call.dtype} has no CUDA C++ kernel"
    size, (first, *_) = call.dtype.itemsize, call.inputs
    if call.columns * size <= LONGEST_GENERATED:
        return "a generated kernel is as fast on short rows"
    result = RowLayout(0, first.rows, call.columns)
    line = line_of(call.columns, size) if call.direction == "forward" else VECTOR
    alignment = alignment_of(call.columns, size, (result, *call.inputs), line)
    if call.direction == "forward":
        # Vectors are those of the rows that are written.
        vectors = vectors_of(call.columns, size, alignment_of(call.columns, size, (result,), line))
        found = _registers(vectors, call.residual)
    elif alignment != "ALIGNED":
        return "rows are not whole vectors of 16 bytes"
    elif size == 2 and _registers(call.columns * size // VECTOR, call.residual) is None:
        # The multiply-add of 16 bits needs `rstd_of` of `registers.cu`.
        found = None
    else:
        found = _tma(call, limits)
    if found is None:
        return f"no kernel holds rows of {call.columns} columns"
    return replace(found, alignment=alignment, line=max(line, found.line))


_MOST_VECTORS, _MOST_PAIRS, _MOST_THREADS = 8, 5, 1024
"""`registers.cu`: the most vectors of x in a thread's registers, without and with a residual; most threads of a row."""
_PAIRED_THREADS = 256
"""Up to this many threads, a row with a residual gets more threads rather than spilled registers: four blocks a
multiprocessor hide each other's barriers, two do not."""


def _registers(vectors: int, residual: bool) -> Schedule | None:
    """The schedule of `registers.cu` for rows of so many vectors; None if no block holds such a row in registers."""
    if vectors > _MOST_VECTORS * _MOST_THREADS:
        return None
    each = _MOST_PAIRS if residual and vectors <= _MOST_PAIRS * _PAIRED_THREADS else _MOST_VECTORS
    row_threads = max(32, 1 << (-(-vectors // each) - 1).bit_length())
    found = Schedule(128 if row_threads == 32 else row_threads, row_threads, -(-vectors // row_threads))
    return replace(found, blocks=blocks_for(found.threads, found.vectors * 4))


_ALONE, _TOGETHER = (4, 16), ((2, 28), (5, 16))
"""`backward_tma.cu`: (vectors of a thread, warps of a multiprocessor) for a row in one block, and two such choices for
a row in a cluster. 16 warps have registers for five vectors, 28 for two."""
_MANY_ON_LINES = 512
"""Rows that begin on cache lines are faster with more warps from this many vectors on."""
_LEAST_STAGES, _MOST_STAGES = 3, 8
"""Rows in shared memory: one for each pass, and at least one on its way."""
PIPELINE_BYTES = 2048
"""An upper bound of the static shared memory of `backward_tma.cu`."""


def _tma(call: NormCall, limits: DeviceLimits) -> Schedule | None:
    """The schedule of `backward_tma.cu`, with the smallest cluster that holds a row; None if no cluster does."""
    size = call.dtype.itemsize
    vectors, on_lines = call.columns * size // VECTOR, call.columns * size % LINE == 0
    alone = ((2, 24) if vectors >= _MANY_ON_LINES else (2, 16)) if on_lines else _ALONE
    shapes = [(alone, 1)] + [(shape, c) for shape in _TOGETHER for c in CLUSTERS[1:]]
    tried = (_tma_shape(call, shape, cluster, -(-vectors // cluster), limits) for shape, cluster in shapes)
    found = next(filter(None, tried), None)
    return found and replace(found, line=LINE if on_lines else VECTOR)


def _tma_shape(
    call: NormCall, shape: tuple[int, int], cluster: int, block_vectors: int, limits: DeviceLimits
) -> Schedule | None:
    if cluster > limits.largest_cluster:
        return None
    vectors, most_warps = shape
    threads = -(-block_vectors // (vectors * 32)) * 32
    warps, row_bytes = threads // 32 + helper_warps(cluster), len(call.inputs) * block_vectors * VECTOR
    weights = block_vectors * call.weight_vector_bytes
    # Clusters of several blocks a multiprocessor are no faster than of one.
    for blocks in range(most_warps // warps if cluster == 1 else min(1, most_warps // warps), 0, -1):
        stages = min(_MOST_STAGES, (room_of(blocks, limits) - PIPELINE_BYTES - weights) // row_bytes)
        if stages >= _LEAST_STAGES:
            return Schedule(
                threads, threads, vectors, cluster, blocks, "tma", stages, block_vectors=block_vectors,
                shared_bytes=stages * row_bytes + weights,
            )  # fmt: skip
    return None


def helper_warps(cluster: int) -> int:
    """Warps of `backward_tma.cu` beside those that compute: one fetches, and one reduces over a cluster."""
    return 2 if cluster > 1 else 1


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
    """The metadata of a call with contiguous matrices, and with weights of their dtype."""
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


def forward(
    call: RecipeBuilder, x: Operand, residual: Operand | None, weight: Operand | None, bias: Operand | None, y: Operand,
    total: Operand | None, mean: Operand, rstd: Operand, eps: float, centered: bool,
) -> None:  # fmt: skip
    """The launch that fills mean, rstd and y, norms of the rows of `x`, or of x + residual (to `total`).

    Matrices are [rows, columns]; y and total are dense.
    """
    matrices = (x,) if residual is None else (x, residual)
    made = call_of("forward", matrices, (weight, bias), bias is not None, centered)
    schedule = _scheduled(made, x.device)
    rows, columns = x.shape
    strides = [layout.stride for layout in made.inputs] + [0] * (2 - len(matrices))
    arguments = (x, residual, y, total, weight, bias, mean if centered else None, rstd, rows, columns, *strides)
    kernel, _ = _kernel(x.device.index, "forward", schedule, made.definitions())
    call.launch(kernel, (schedule.programs(rows),), *arguments, eps)


def backward(
    call: RecipeBuilder, dy: Operand, x: Operand, dsum: Operand | None, weight: Operand | None, mean: Operand,
    rstd: Operand, dx: Operand, d_weight: Operand, d_bias: Operand, centered: bool,
) -> None:  # fmt: skip
    """The launches that fill dx (plus `dsum`), dweight and dbias; dx is dense, an empty gradient is not wanted."""
    matrices = (x, dy) if dsum is None else (x, dy, dsum)
    made = call_of("backward", matrices, (weight,), d_bias.numel() > 0, centered)
    schedule = _scheduled(made, x.device)
    kernel, at_once = _kernel(x.device.index, "backward", schedule, made.definitions())
    rows, columns = x.shape
    strides = [layout.stride for layout in made.inputs] + [0] * (3 - len(matrices))
    # Each program leaves its sums over rows.
    programs = min(at_once, schedule.programs(rows))
    partial = call.empty((made.weights, programs, columns), torch.float32) if made.weights else None
    call.launch(
        kernel, (programs * schedule.cluster,),
        x, dy, dsum, dx, weight, mean if centered else None, rstd, partial, rows, columns, *strides,
    )  # fmt: skip
    if partial is not None:
        # Imported here, since Triton exists on Linux alone.
        from tilewright.kernels.column_sums import add_parts

        add_parts(call, partial, *(each for each in (d_weight, d_bias) if each.numel()))
