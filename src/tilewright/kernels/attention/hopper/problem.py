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
        ("dq_sums", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
        ("work_counters", ctypes.c_void_p),
        ("dq", ctypes.c_void_p),
        ("dq_batch", ctypes.c_uint64),
        ("dq_head", ctypes.c_uint64),
        ("dq_position", ctypes.c_uint64),
        ("zeroed", ctypes.c_void_p),
        ("added", ctypes.c_void_p),
        ("queries", ctypes.c_int),
        ("keys", ctypes.c_int),
        ("q_blocks", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("group", ctypes.c_int),
        ("kv_heads", ctypes.c_int),
        ("k_blocks", ctypes.c_int),
        ("blocks", ctypes.c_int),
        ("width", ctypes.c_int),
        ("ahead", ctypes.c_int),
        ("below", ctypes.c_int),
        ("above", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("scale_log2", ctypes.c_float),
    )


def problem_of(made: BackwardLaunches, request: Request) -> Problem:
    """The problem of a plan, but for addresses and the strides of dq."""
    problem = Problem(width=request.head_size, ahead=made.ahead, heads=request.heads)
    problem.queries, problem.keys, problem.q_blocks = request.queries, request.keys, made.q_blocks
    problem.group, problem.kv_heads, problem.k_blocks = request.group, request.kv_heads, made.k_blocks
    problem.blocks = made.k_blocks * request.kv_heads * request.batch
    problem.below, problem.above = made.below, made.above
    problem.scale, problem.scale_log2 = scale_of(request), request.scale * LOG2_E
    return problem


def scale_of(request: Request) -> float:
    """The factor of dQ and dK; 0 where a query sees one key: its weight is 1 for any score, and dP - Δ is rounding."""
    return 0.0 if request.single_key else request.scale


class Scratch(NamedTuple):
    """Bytes from the begin of a call's scratch to its parts. A program's share of each is a multiple of 16 bytes."""

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
