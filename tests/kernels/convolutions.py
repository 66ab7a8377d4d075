"""Convolutions of few input channels against float64 and PyTorch's, on any device."""

import itertools

import torch

from tilewright.kernels.convolution import COLUMNS, LEAST_TAPS, convolution, refusal
from tilewright.measure.truth.contract import compare

Pair = tuple[int, int]
FORMATS = torch.contiguous_format, torch.channels_last
CASES = [
    # x, weight, stride, padding, dilation
    ((2, 3, 19, 23), (33, 3, 3, 5), (1, 1), (1, 2), (1, 1)),
    ((1, 8, 9, 140), (70, 8, 3, 3), (1, 1), (0, 0), (1, 1)),
    ((2, 1, 17, 31), (5, 1, 7, 7), (2, 3), (3, 3), (1, 1)),
    ((1, 16, 12, 12), (8, 16, 3, 3), (1, 1), (3, 4), (2, 3)),
    ((3, 5, 6, 7), (4, 5, 1, 1), (1, 2), (0, 0), (1, 1)),
]


def keeps_contract(
    x: tuple[int, ...], weight: tuple[int, ...], stride: Pair, padding: Pair, dilation: Pair, kind: torch.dtype,
    device: str,
) -> None:  # fmt: skip
    """By both tilings, from and into both layouts."""
    own = torch.Generator().manual_seed(0)
    image, taps = (torch.randn(shape, generator=own).to(device, kind) for shape in (x, weight))
    wide, narrow = ((image.double(), taps.double()), (image, taps))
    true, theirs = (torch.conv2d(a, b, None, stride, padding, dilation) for a, b in (wide, narrow))
    for columns, before, after in itertools.product(COLUMNS, FORMATS, FORMATS):
        operands = [one.contiguous(memory_format=before) for one in (image, taps)]
        is_precise = kind != torch.float32 or taps[0].numel() >= LEAST_TAPS
        assert (refusal(*operands) is None) == is_precise
        if not is_precise:
            continue
        made = convolution(*operands, stride, padding, dilation, after == torch.channels_last, columns)
        assert made.is_contiguous(memory_format=after)
        assert compare(made, theirs, true).ok
