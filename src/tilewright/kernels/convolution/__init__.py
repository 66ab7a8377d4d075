"""2-D convolutions of few input channels, the first ones of most vision models: `tilewright::convolution`.

cuDNN pads such channels to 8 or more, and converts images to channels-last: 64 images of 3 × 224 × 224 by 7 × 7 windows
to 64 channels take it 642 µs in bf16 (456 where all is channels-last already), this kernel 301 (222); 128 images of 8 ×
128 × 128 by 3 × 3 to 64 channels 992 (549) and 319 (230), on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from tilewright.kernels.device import DTYPES, NARROW, runs_triton
from tilewright.kernels.registration import define
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe, dense_strides

MOST_CHANNELS = 16
"""Beyond these cuDNN is faster: 32 channels in bf16, channels-last, 85 µs and 234."""
MOST_TAPS = 400
"""Elements of a window over all channels: the loop over them is unrolled."""
LEAST_TAPS = 27
"""In fp32: a sum of fewer rounds less than the 22 bits in which three products of TF32 read each operand."""
MOST_OFFSET = 2**31 - 1
"""Offsets in one image take 32 bits."""
COLUMNS = (32, 64)
"""Channels of the result in a tile: the tilings that are raced."""


class Tiling(NamedTuple):
    """How a call is divided among programs; `rows` are pixels, `depth` elements of the window."""

    rows: int
    columns: int
    depth: int
    warps: int


def tiling(dtype: torch.dtype, columns: int) -> Tiling:
    """The tiling with so many columns. One of the two is the fastest of nine in 23 of 24 cases: six first convolutions,
    two layouts, bf16 and fp32 (H200)."""
    if columns == COLUMNS[0]:
        return Tiling(128, columns, 32, 4)
    return Tiling(128, columns, 16, 8) if dtype in NARROW else Tiling(64, columns, 32, 4)


def refusal(x: torch.Tensor | Operand, weight: torch.Tensor | Operand) -> str | None:
    """Why the kernel does not take x [N, C, H, W] and weight [O, C, KH, KW]; None if it does."""
    if x.dim() != 4 or weight.dim() != 4 or x.shape[1] != weight.shape[1]:
        return "its kernel takes one group of 2-D images"
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        return "its kernel takes bf16, fp16 and fp32"
    channels, *window = weight.shape[1:]
    if not 1 <= channels <= MOST_CHANNELS or channels * prod(window) > MOST_TAPS:
        return f"its kernel takes up to {MOST_CHANNELS} input channels and {MOST_TAPS} elements of a window"
    if x.dtype == torch.float32 and channels * prod(window) < LEAST_TAPS:
        return f"its products of TF32 are less precise than fp32 in sums of fewer than {LEAST_TAPS}"
    if not (prod(x.shape) and prod(weight.shape)):
        return "it is empty"
    return None


def result_shape(
    x: Sequence[int], weight: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """[N, O, …] of a convolution of these shapes.

    >>> result_shape((64, 3, 224, 224), (64, 3, 7, 7), (2, 2), (3, 3), (1, 1))
    (64, 64, 112, 112)
    """
    sizes = zip(x[2:], weight[2:], stride, padding, dilation, strict=True)
    return (x[0], weight[0], *((n + 2 * pad - apart * (k - 1) - 1) // step + 1 for n, k, step, pad, apart in sizes))


def result_strides(shape: Sequence[int], *, channels_last: bool) -> tuple[int, ...]:
    """Strides in elements of a result [N, O, H, W] without gaps."""
    return dense_strides(shape, (0, 2, 3, 1) if channels_last else None)


Pair = Sequence[int]


def _by_library(
    x: torch.Tensor, weight: torch.Tensor, stride: Pair, padding: Pair, dilation: Pair, last: bool, columns: int
) -> torch.Tensor:
    result = torch.conv2d(x, weight, None, stride, padding, dilation)
    return result.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def _fake(
    x: torch.Tensor, weight: torch.Tensor, stride: Pair, padding: Pair, dilation: Pair, last: bool, columns: int
) -> torch.Tensor:
    shape = result_shape(x.shape, weight.shape, stride, padding, dilation)
    return x.new_empty_strided(shape, result_strides(shape, channels_last=last))


def _recipe(
    call: RecipeBuilder, x: Operand, weight: Operand, stride: Pair, padding: Pair, dilation: Pair, last: bool,
    columns: int,
) -> Recipe | None:  # fmt: skip
    shape = result_shape(x.shape, weight.shape, stride, padding, dilation)
    strides, made = result_strides(shape, channels_last=last), tiling(x.dtype, columns)
    # Of one image, with what windows reach beyond it.
    (_, *inner), (_, *own) = x.strides, strides
    reach = sum((n + 2 * pad) * step for n, pad, step in zip(x.shape[1:], (0, *padding), inner, strict=True))
    written = sum(n * step for n, step in zip(shape[1:], own, strict=True))
    if not runs_triton(x) or refusal(x, weight) is not None or max(reach, written) > MOST_OFFSET:
        return None
    from tilewright.kernels.convolution.triton import convolve_rows

    y = call.empty(shape, x.dtype, strides)
    # Three products of TF32 are as precise as one of fp32; of 16 bits all are one product.
    precision = "tf32x3" if x.dtype == torch.float32 and torch.version.hip is None else "ieee"
    batch, channels_out, height, width = shape
    segments = -(-width // made.rows)
    call.launch(
        convolve_rows, (batch * height * segments, -(-channels_out // made.columns)), x, weight, y, *x.shape[2:],
        height, width, channels_out, segments, *x.strides, *weight.strides, *strides, CHANNELS=x.shape[1],
        KH=weight.shape[2], KW=weight.shape[3], STEP_H=stride[0], STEP_W=stride[1], PAD_H=padding[0], PAD_W=padding[1],
        APART_H=dilation[0], APART_W=dilation[1], CHANNELS_LAST=x.strides[1] == 1 < x.strides[3],
        PRECISION=precision, BLOCK_M=made.rows, BLOCK_N=made.columns, BLOCK_K=made.depth, num_warps=made.warps,
        num_stages=2,
    )  # fmt: skip
    return call.finish(y)


convolution = define("convolution", _by_library, _fake, recipe=_recipe)
