"""Matrices that hurt a kernel of rows: odd lengths, layouts, storage and values."""

from __future__ import annotations

import math

import torch

LAYOUTS = (
    "1x1", "0x7", "3x0", "5x1", "3x2", "7x33", "2x257", "3x1031", "2x2048",
    "every other row", "every other column", "columns of a wider matrix", "transposed", "one element in",
    "one row of many", "3-d",
)  # fmt: skip
"""Names for `layout`."""
SPECIALS = ("nan", "+inf", "-inf", "1e30", "row of -inf", "largest", "row of lowest", "spread")
"""Names for `layout`, of values."""


def layout(name: str, dtype: torch.dtype, device: torch.device, columns: int = 301) -> torch.Tensor:
    """A matrix by name (`RxC`, or one of LAYOUTS or SPECIALS of so many columns), standard normal otherwise."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    if name in SPECIALS:
        return _special(name, normal(5, columns))
    if name == "every other row":
        return normal(10, columns)[::2]
    if name == "every other column":
        return normal(4, 2 * columns)[:, ::2]
    if name == "columns of a wider matrix":
        return normal(4, columns + 17)[:, 3:-14]
    if name == "transposed":
        return normal(columns, 6).t()
    if name == "one element in":
        return normal(4 * columns + 1)[1:].view(4, columns)
    if name == "one row of many":
        return normal(9, columns)[4:5]
    if name == "3-d":
        return normal(2, 3, columns)
    rows, length = name.split("x")
    return normal(int(rows), int(length))


def _special(name: str, x: torch.Tensor) -> torch.Tensor:
    info = torch.finfo(x.dtype)
    if name == "row of -inf":
        x[2] = -math.inf
    elif name == "row of lowest":
        x[2] = info.min
    elif name == "largest":
        x[1, 3], x[3] = info.max, info.max
    elif name == "spread":
        x *= 50
    else:
        x[1, 3], x[3, -1] = float(name), float(name)
    return x
