"""The parameter structure of the backward's main kernel, and the layout of its launches' scratch."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

from tilewright.kernels.attention.request import Request

if TYPE_CHECKING:
    from tilewright.kernels.attention.hopper.backward import BackwardLaunches

LOG2_E = 1.4426950408889634
COUNTERS, COUNTERS_OF_A_HEAD = 4, 2
"""Counters of 32 bits in scratch: claimed work; for each key head, blocks that are zeroed and added."""


class Problem(ctypes.Structure):
    """`Problem` of `backward_scores.cuh`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("dq_sums", "lse", "delta", "work_counters", "dq")),
        *((name, ctypes.c_uint64) for name in ("dq_batch", "dq_head", "dq_position")),
        *((name, ctypes.c_void_p) for name in ("zeroed", "added")),
        *((name, ctypes.c_int) for name in ("queries", "keys", "q_blocks", "heads", "group", "kv_heads", "k_blocks")),
        *((name, ctypes.c_int) for name in ("blocks", "width", "ahead", "below", "above")),
        *((name, ctypes.c_float) for name in ("scale", "scale_log2")),
    )


def problem_of(made: BackwardLaunches, request: Request) -> Problem:
    """The problem of a plan, without addresses and the strides of dq."""
    problem = Problem(width=request.head_size, ahead=made.ahead, heads=request.heads)
    problem.queries, problem.keys, problem.q_blocks = request.queries, request.keys, made.q_blocks
    problem.group, problem.kv_heads, problem.k_blocks = request.group, request.kv_heads, made.k_blocks
    problem.blocks = made.k_blocks * request.kv_heads * request.batch
    problem.below, problem.above = made.below, made.above
    problem.scale, problem.scale_log2 = scale_of(request), request.scale * LOG2_E
    return problem


def scale_of(request: Request) -> float:
    """The factor of dQ and dK; 0 if queries see one key, whose weight is 1 for any score: dP - Δ is rounding alone."""
    return 0.0 if request.single_key else request.scale


class Scratch(NamedTuple):
    """Offsets in bytes of the parts of a call's scratch. A program's share of each is a multiple of 16 bytes."""

    dq_sums: int
    lse: int
    """Scaled, in powers of two."""
    delta: int
    work_counters: int
    zeroed: int
    added: int
    numbers: int
    """All 32-bit numbers together."""


def scratch_of(made: BackwardLaunches, request: Request) -> Scratch:
    """The scratch of a plan's launches."""
    heads = request.batch * request.heads
    rows = heads * made.q_blocks * made.shape.queries
    lse = 4 * rows * made.shape.head
    delta, work_counters = lse + 4 * rows, lse + 8 * rows
    zeroed = work_counters + 4 * COUNTERS
    numbers = rows * (made.shape.head + 2) + COUNTERS + COUNTERS_OF_A_HEAD * heads
    return Scratch(0, lse, delta, work_counters, zeroed, zeroed + 4 * heads, numbers)
