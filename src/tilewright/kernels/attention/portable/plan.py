"""What the launches of the portable attention kernels share: plans, and the numbers and constants of a call."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewright.kernels.attention.request import NARROWEST, VECTOR_STEP, Request
from tilewright.kernels.device import interpreted

LOG2E = math.log2(math.e)
SPARE_BYTES = 4096
"""Of a program's shared memory, for barriers and what the compiler moves through it."""


Box = tuple[tuple[int, ...], int, int]
"""Strides of a tensor [batch, head, place, column], and the places and columns of a piece of it."""


class Blocks(NamedTuple):
    """How a kernel is cut: positions of a program's block and of a step, warps, steps on their way at once."""

    queries: int
    keys: int
    warps: int
    stages: int


class Plan:
    """A launch without its tensors."""

    def __init__(
        self, kernel: Any, grid: int, numbers: Sequence[float], constants: dict[str, Any], blocks: Blocks,
        boxes: Sequence[Box] = (),
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.numbers, self.constants, self.blocks = kernel, grid, numbers, constants, blocks
        self.boxes = boxes
        self._built: Any = None

    def described(self, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
        """The tensors as the kernel takes them: tensor descriptors where it has `boxes` (strides, rows, columns)."""
        if not self.boxes:
            return tensors
        return [
            TensorDescriptor(tensor, list(tensor.shape), list(strides), [1, 1, rows, columns])
            for tensor, (strides, rows, columns) in zip(tensors, self.boxes, strict=True)
        ]

    def run(self, *tensors: Any) -> None:
        """Launch on the current stream of the current device."""
        aligned = all(t.data_ptr() % 16 == 0 for t in tensors if isinstance(t, torch.Tensor))
        if self._built is not None and aligned:
            # What the compiler was told of the arguments holds: the numbers are the same, the pointers aligned.
            self._built[self.grid, 1, 1](*tensors, *self.numbers, *self.constants.values())
            return
        built = self.kernel[self.grid,](
            *tensors, *self.numbers, **self.constants, num_warps=self.blocks.warps, num_stages=self.blocks.stages
        )
        if aligned and not interpreted():
            self._built = built


def lanes_of(request: Request) -> int:
    """Batch entries, or packed sequences."""
    return request.sequences or request.batch


def sizes_of(request: Request, steps: int) -> tuple[int, ...]:
    """What the kernels take from `heads` to `value_size`."""
    sizes = (request.queries, request.keys, request.head_size, request.value_size)
    return (request.heads, request.group, steps, *sizes)


def factors_of(request: Request) -> tuple[float, float]:
    """`factor` and `softcap` as the kernels' `scores` takes them."""
    unit = 1.0 if request.dtype == torch.float32 else LOG2E
    if request.softcap:
        return request.scale / request.softcap, request.softcap * unit
    return request.scale * unit, 0.0


def band_of(request: Request) -> tuple[int, int]:
    """`left` and `right`, which the kernels read only where there are limits."""
    return request.left or 0, request.right or 0


def constants_of(request: Request, blocks: Blocks, widths: tuple[int, int], described: bool) -> dict[str, Any]:
    """What the kernels are compiled for, in the order of their parameters."""
    return {
        "LEFT": request.left is not None,
        "RIGHT": request.right is not None,
        "SOFTCAP": request.softcap != 0.0,
        "ALIBI": request.alibi,
        "MASK": request.mask,
        "DROPS": request.dropout > 0.0,
        "PACKED": request.sequences > 0,
        "PRECISION": "tf32" if request.tf32 else "ieee",
        "BLOCK_Q": blocks.queries,
        "BLOCK_K": blocks.keys,
        "WIDTH": widths[0],
        "VALUE_WIDTH": widths[1],
        "WHOLE": widths == (request.head_size, request.value_size),
        "DESCRIBED": described,
    }


def widths_of(request: Request) -> tuple[int, int]:
    """Head sizes padded to what a product of tiles takes: powers of two, 16 at least.

    NARROWEST at least for 16 bits that come one element at a time on Hopper. Of 23 such kinds, ptxas 12.8, which
    Triton 3.6 brings, made code of 13 that is wrong on an H200 and of 2 that leaves its memory: all that have values
    of 16 or 32 columns and wider heads. ptxas 13 made none such of 54, nor did 12.8 of the 22 that come in vectors.
    """
    narrow = request.dtype != torch.float32 and _has_bulk_copies(request.device)
    least = NARROWEST if narrow and not (fetches_in_bulk(request) or fetches_in_vectors(request)) else 16
    head_size, value_size = (triton.next_power_of_2(x) for x in (request.head_size, request.value_size))
    return max(least, head_size), max(least, value_size)


def fitting(blocks: Blocks, kept: int, step: int, most: int) -> Blocks:
    """`blocks`, or fewer steps on their way, or smaller ones, that take `most` bytes of shared memory at most.

    A program holds tiles of `kept` bytes a position of its block, and of `step` bytes a position of each step.
    `blocks.queries` counts the block's positions and `blocks.keys` those of a step.
    """
    while blocks.queries * kept + blocks.stages * blocks.keys * step > most:
        if blocks.stages > 1:
            blocks = blocks._replace(stages=blocks.stages - 1)
        elif max(blocks.queries, blocks.keys) == 16:
            break
        elif blocks.queries > blocks.keys:
            blocks = blocks._replace(queries=blocks.queries // 2)
        else:
            blocks = blocks._replace(keys=blocks.keys // 2)
    return blocks


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have; no limit where the kernels are interpreted."""
    if device.type != "cuda":
        return 2**31
    index = torch.cuda.current_device() if device.index is None else device.index
    most: int = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return most - SPARE_BYTES


@functools.cache
def _has_bulk_copies(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _repeats(strides: Sequence[int], shape: Sequence[int]) -> bool:
    return any(step == 0 and count > 1 for step, count in zip(strides, shape, strict=False))


def _shapes(request: Request) -> tuple[tuple[int, int, int], ...]:
    """Batch, heads and places of q, k, v and the gradient of the result."""
    own = (request.batch, request.heads, request.queries)
    shared = (request.batch, request.kv_heads, request.keys)
    return own, shared, shared, own


def fetches_in_bulk(request: Request) -> bool:
    """Whether tiles of q, k and v come by bulk copies: from compute capability 9.0 on, without repeated axes.

    Packed sequences do not: beyond the end of one lie the values of the next, not zeros.
    """
    strides = (request.q_strides, request.k_strides, request.v_strides)
    if not request.aligned or request.sequences or not _has_bulk_copies(request.device):
        return False
    return not any(_repeats(step, shape) for step, shape in zip(strides, _shapes(request), strict=False))


def fetches_in_vectors(request: Request) -> bool:
    """Whether 16 bytes at a time come through pointers."""
    strides = (*request.q_strides[:3], *request.k_strides[:3], *request.v_strides[:3])
    return request.aligned and not any(x % VECTOR_STEP for x in (*strides, request.head_size, request.value_size))


def boxes_of(
    request: Request, blocks: Sequence[int], widths: tuple[int, int], dout: Sequence[int] = ()
) -> Sequence[Box]:
    """Of q, k, v and, where its strides are given, dout: what a bulk copy fetches; nothing where there are none."""
    if not fetches_in_bulk(request):
        return ()
    sizes = (request.head_size, request.head_size, request.value_size, request.value_size)
    strides = [request.q_strides, request.k_strides, request.v_strides, *([tuple(dout[:3])] if dout else [])]
    boxes: list[Box] = []
    padded = (widths[0], *widths, widths[1])
    for stride, shape, size, rows, width in zip(strides, _shapes(request), sizes, blocks, padded, strict=False):
        # The step along an axis of one is free, and must still be a multiple of 16 bytes.
        steps = [step if count > 1 else 16 * size for step, count in zip(stride, shape, strict=False)]
        boxes.append(((*steps, 1), rows, width))
    return boxes
