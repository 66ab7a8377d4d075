"""How PyTorch converts to floats of 8 bits: whether a number that is too large saturates differs between versions."""

from __future__ import annotations

import functools

from tilewright.operators.language import FLOAT8


def with_beyond(dtype: str, value: str) -> str:
    """The arguments of the generated function that converts `value` to `dtype`, with `beyond` for floats of 8 bits."""
    return f"{value}, {_beyond(dtype):#x}" if dtype in FLOAT8 else value


@functools.cache
def _beyond(dtype: str) -> int:
    """The byte that PyTorch makes of a positive number beyond `dtype`: NaN, infinity or the largest."""
    import torch

    found = torch.tensor([1e30]).to(getattr(torch, dtype)).view(torch.uint8)
    return int(found.item())
