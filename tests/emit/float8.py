"""Conversions to floats of 8 bits and back of every number of 16 bits, and of numbers of 32 at the limits."""

from collections.abc import Callable

import torch

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SOURCES = (torch.bfloat16, torch.float16, torch.float32)
LIMITS = (464.0, 464.00003, 479.0, 480.0, 61439.996, 61440.0, 65536.0, 2.0**-6, 2.0**-9, 2.0**-10, 2.0**-16, 2.0**-17)


def numbers(source: torch.dtype) -> torch.Tensor:
    """All of 16 bits; of 32 those that bf16 has, and some between them."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    if source is not torch.float32:
        return patterns.view(source)
    drawn = torch.randn(20000, generator=torch.Generator().manual_seed(0))
    limits = torch.tensor(LIMITS)
    return torch.cat([patterns.view(torch.bfloat16).float(), drawn * 300, drawn / 1000, limits, -limits])


def conversions(dtype: torch.dtype, source: torch.dtype) -> list[tuple[Callable[..., torch.Tensor], torch.Tensor]]:
    """Functions and what to call them with: to `dtype`, to it and back between other operators, from it."""
    x = numbers(source)
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    return [
        (lambda x: x.to(dtype), x),
        (lambda x: (x.float() * 1.5).to(dtype).float() * 0.7, x),
        (lambda y: y.to(source) * 2, every),
    ]


def same(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, but for the bits of NaN."""
    result, expected = result.float(), expected.float()
    nan = expected.isnan()
    return torch.equal(result.isnan(), nan) and torch.equal(
        result.where(~nan, 0).view(torch.int32), expected.where(~nan, 0).view(torch.int32)
    )
