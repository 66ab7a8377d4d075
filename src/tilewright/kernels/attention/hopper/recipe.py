"""The Hopper kernels' launches as parts of a recipe: tensor maps, structures and scratch of forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.hardware.architectures import DeviceLimits
from tilewright.kernels.attention.hopper import backward as hopper_backward
from tilewright.kernels.attention.hopper import forward as hopper_forward
from tilewright.kernels.attention.hopper.launch import BOX_COLUMNS, built
from tilewright.kernels.attention.hopper.problem import Problem, problem_of, scale_of, scratch_of
from tilewright.kernels.attention.request import Request
from tilewright.launch.builder import Operand, RecipeBuilder, tensor_map
from tilewright.records.recipe import Pointer, Structure, TensorMap


def forward(
    call: RecipeBuilder, request: Request, limits: DeviceLimits, q: Operand, k: Operand, v: Operand, out: Operand,
    lse: Operand,
) -> None:  # fmt: skip
    """The launch that fills `out` and `lse`; its table of tiles is sent to the device now."""
    table = None
    try:
        made, table = hopper_forward.plan_with_table(request, limits)
    except hopper_forward.NoTable:
        made = hopper_forward.plan(request, limits, with_table=False)
    arguments: list[object] = []
    for x, rows in zip((q, k, v, out), made.rows, strict=True):
        encoded = tensor_map(x, (1, 1, rows, BOX_COLUMNS))
        steps = (nbytes // x.itemsize for nbytes in reversed(encoded.strides))
        arguments += encoded, *x.shape, *steps, 1
    order = lse if table is None else call.keep(table)
    kernel = built(made.tiles, request.device.index or 0)
    scales = made.scale, made.tanh_scale
    call.launch(kernel, (made.programs,), *arguments, lse, order, *scales, *made.counts, None, None)


def backward(
    call: RecipeBuilder, request: Request, limits: DeviceLimits, q: Operand, k: Operand, v: Operand, out: Operand,
    lse: Operand, dout: Operand, dq: Operand, dk: Operand, dv: Operand,
) -> None:  # fmt: skip
    """The launches that fill `dq`, `dk` and `dv`: prepare, main and, where no spare warps round dQ, finish."""
    made = hopper_backward.plan(request, limits)
    kernels, parts = hopper_backward.built(made, request), scratch_of(made, request)
    scratch = call.empty((parts.numbers,), lse.dtype)
    sums, scaled_lse, delta, work_counters = (
        scratch.as_strided((1,), (1,), at // lse.itemsize)
        for at in (parts.dq_sums, parts.lse, parts.delta, parts.work_counters)
    )
    grid, sizes = (made.q_blocks, request.heads, request.batch), (request.queries, request.head_size)
    zeroed = made.ahead * request.group if made.ahead else request.batch * request.heads
    call.launch(
        kernels.prepare, grid, out, dout, lse, scaled_lse, delta, sums, work_counters,
        *out.strides[:3], *dout.strides[:3], *sizes, zeroed,
    )  # fmt: skip
    maps = _maps(made.shape, (q, k, v, dout, dk, dv))
    call.launch(kernels.main, (made.programs,), *maps, _problem(made, request, scratch, dq))
    if not made.ahead:
        call.launch(kernels.finish, grid, sums, dq, *dq.strides[:3], *sizes, scale_of(request))


def _problem(made: hopper_backward.BackwardLaunches, request: Request, scratch: Operand, dq: Operand) -> Structure:
    problem, parts = problem_of(made, request), scratch_of(made, request)
    problem.dq_batch, problem.dq_head, problem.dq_position = dq.strides[:3]
    pointers = [(Problem.dq.offset, Pointer(dq.index))]
    for name, at in parts._asdict().items():
        if name != "numbers":
            pointers.append((getattr(Problem, name).offset, Pointer(scratch.index, at)))
    return Structure(bytes(problem), tuple(pointers))


def _maps(shape: hopper_backward.BackwardTiles, tensors: Sequence[Operand]) -> list[TensorMap]:
    """Tensor maps to fetch tiles of q, k, v and dout, and to store each warpgroup's tiles of dk and dv."""
    keys, part = hopper_backward.KEYS // shape.cluster, hopper_backward.KEYS // hopper_backward.GROUPS
    rows = shape.queries, keys, keys, shape.queries, part, part
    return [tensor_map(x, (1, 1, count, BOX_COLUMNS)) for x, count in zip(tensors, rows, strict=True)]
