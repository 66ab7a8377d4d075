"""Launches of the product of fp32 by 16-bit matrix instructions (`cuda.cu`), built at run time."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch

from tilewright.graph import calls
from tilewright.hardware.architectures import limits_of
from tilewright.launch.builder import Operand, RecipeBuilder, tensor_map
from tilewright.launch.nvrtc import Kernel, bindings_installed, kernel
from tilewright.records.recipe import Pointer, Structure

SOURCE = Path(__file__).parent / "cuda.cu"
TILE, DEPTH = 128, 32
"""Rows and columns of a program's tile, and its step along K."""
VECTOR = 4
"""Values of fp32 in 16 bytes; lines of an operand must begin at multiples of it."""
THREADS = 384
"""Producer, three warps that cut the right operand, and two warpgroups that multiply."""
ADDERS, SLABS = 32, 8
"""Threads of a program that adds the shares of 16 rows of a tile, and the programs of a tile."""
LEFT_SLOTS, RIGHT_SLOTS, PART_SLOTS = 4, 3, 4
SHARED_BYTES = (
    (LEFT_SLOTS + RIGHT_SLOTS) * TILE * DEPTH * 4
    + PART_SLOTS * 3 * TILE * DEPTH * 2
    + 8 * 2 * (LEFT_SLOTS + RIGHT_SLOTS + PART_SLOTS)
)
"""The rings of left, of right and of right's parts, and their barriers."""


class Problem(ctypes.Structure):
    """`Problem` of the source."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("batch", "m", "n", "k")),
        *((name, ctypes.c_uint64) for name in ("left_line", "left_batch", "right_line", "right_batch")),
        *((name, ctypes.c_int) for name in ("shared_tiles", "share")),
        *((name, ctypes.c_void_p) for name in ("y", "left", "right", "bias", "shares")),
    )


def refuses(left: torch.Tensor | Operand, right: torch.Tensor | Operand) -> str | None:
    """Why this kernel does not compute left [(B,) M, K] · right [(B,) K, N], by metadata and device; or None."""
    if not left.is_cuda or {left.dtype, right.dtype} != {torch.float32}:
        return f"{left.dtype} and {right.dtype} on {left.device.type}: only fp32 on a GPU"
    if not (limits := limits_of(left.device)).wgmma:
        return f"compute capability {limits.capability} lacks the matrix instructions of a warpgroup (wgmma)"
    if refusal := size_refusal(left, right):
        return refusal
    return None if bindings_installed() else "the package cuda-bindings is not installed"


def size_refusal(left: torch.Tensor | Operand, right: torch.Tensor | Operand) -> str | None:
    """The part of `refuses` that any device can tell."""
    *outer, m, k, n = map(calls.number, (*left.shape, right.shape[-1]))
    if 0 in (*outer, m, k, n):
        return "it is empty"
    if max(m, n) >= 2**31 - TILE or k >= 2**27:
        return f"{m}x{n}x{k}: more than 32-bit counts of tiles and steps hold"
    return None


def is_copied(x: Operand) -> bool:
    """Whether x is copied first: its lines have gaps inside, share memory, or begin at no multiples of 16 bytes."""
    *outer, adjacent = _in_memory(x).strides
    return bool(adjacent != 1 or x.data_ptr() % 16 or any(step % VECTOR or step == 0 for step in outer))


def _is_transposed(x: Operand) -> bool:
    """Whether x lies column by column."""
    return bool(x.stride(-1) != 1 and x.stride(-2) == 1)


def _in_memory(x: Operand) -> Operand:
    """x [B, lines, columns] in the order of its memory; B is 1 for a matrix."""
    shape, strides = [*x.shape], [*x.stride()]
    if _is_transposed(x):
        shape[-2:], strides[-2:] = shape[:-3:-1], strides[:-3:-1]
    if x.dim() == 2:
        shape, strides = [1, *shape], [VECTOR, *strides]
    # An axis of size 1 may have any stride.
    strides[:-1] = [step if size > 1 else VECTOR for size, step in zip(shape[:-1], strides[:-1], strict=True)]
    return x.as_strided(shape, strides)


def _aligned(call: RecipeBuilder, x: Operand) -> Operand:
    if not is_copied(x):
        return x
    _, lines, columns = _in_memory(x).shape
    line = -(-columns // VECTOR) * VECTOR
    inner = (1, line) if _is_transposed(x) else (line, 1)
    return call.copy(x, (lines * line, *inner)[-x.dim() :])


def product(call: RecipeBuilder, left: Operand, right: Operand, bias: Operand | None) -> Operand:
    """left [(B,) M, K] · right [(B,) K, N] + bias [N] in fp32, for operands for which `refuses` is None.

    An operand whose lines do not begin at multiples of 16 bytes is copied first (`is_copied`).
    """
    left, right = _aligned(call, left), _aligned(call, right)
    *batch, m, k = left.shape
    n = right.shape[-1]
    y = call.empty((*batch, m, n), torch.float32)
    lefts, rights = _in_memory(left), _in_memory(right)
    batches = lefts.shape[0]
    work = divided(batches * -(-m // TILE) * -(-n // TILE), -(-k // DEPTH), limits_of(left.device).multiprocessors)
    shares = call.empty((work.programs * 2 * TILE * TILE,), torch.float32) if work.shared_tiles else None
    lines = lefts.stride(1), lefts.stride(0), rights.stride(1), rights.stride(0)
    problem = Problem(batches, m, n, k, *lines, work.shared_tiles, work.share)
    placed = {
        Problem.y: y, Problem.left: left, Problem.right: right, Problem.bias: bias, Problem.shares: shares,
    }  # fmt: skip
    patches = tuple((field.offset, Pointer(x.index, x.offset)) for field, x in placed.items() if x is not None)
    structure = Structure(bytes(problem), patches)
    along = not _is_transposed(left), _is_transposed(right)
    boxes = ((1, TILE, DEPTH) if is_along else (1, DEPTH, DEPTH) for is_along in along)
    maps = (tensor_map(x, box) for x, box in zip((lefts, rights), boxes, strict=True))
    multiply, add_shares = _built(*along, bias is not None, left.device.index)
    call.launch(multiply, (work.programs,), *maps, structure)
    if work.shared_tiles:
        call.launch(add_shares, (work.shared_tiles * SLABS,), structure)
    return y


class Division(NamedTuple):
    """How tiles are divided among programs: the first are shared out by steps, the rest are waves of whole tiles."""

    programs: int
    shared_tiles: int = 0
    share: int = 0
    """Steps of each program's share."""


FULL = 0.95
"""Nothing is shared out where whole tiles keep the programs as busy as this."""
LEAST_STEPS = 8
"""The fewest steps of a share, and the fewest that sharing spares: adding the shares takes about as long."""


def divided(tiles: int, steps: int, multiprocessors: int) -> Division:
    """The division of `tiles` of `steps` each.

    >>> divided(264, 24, 132), divided(144, 256, 132), divided(4, 2048, 132), divided(4, 8, 132)
    (Division(programs=132, shared_tiles=0, share=0), Division(programs=132, shared_tiles=144, share=280), \
Division(programs=131, shared_tiles=4, share=63), Division(programs=4, shared_tiles=0, share=0))
    """
    waves, whole = -(-tiles // multiprocessors), Division(min(tiles, multiprocessors))
    if tiles >= FULL * waves * multiprocessors:
        return whole
    shared = tiles if waves <= 2 else tiles % multiprocessors + multiprocessors
    share = max(-(-shared * steps // multiprocessors), LEAST_STEPS)
    if min(waves, 2) * steps - share < LEAST_STEPS:
        return whole
    programs = multiprocessors if tiles > multiprocessors else -(-shared * steps // share)
    return Division(programs, shared, share)


@functools.cache
def _built(left_along: bool, right_along: bool, bias: bool, device: int) -> tuple[Kernel, Kernel]:
    """The product, and the sum of shares."""
    settings = definitions(left_along, right_along, bias)
    multiply = kernel(
        SOURCE, "product", "", device=device, threads=THREADS, shared_bytes=SHARED_BYTES, definitions=settings
    )
    return multiply, kernel(SOURCE, "add_shares", "", device=device, threads=ADDERS, definitions=settings)


def definitions(left_along: bool, right_along: bool, bias: bool) -> tuple[tuple[str, int], ...]:
    """The macros that the source is compiled with."""
    return ("LEFT_ALONG_K", int(left_along)), ("RIGHT_ALONG_K", int(right_along)), ("BIAS", int(bias))
