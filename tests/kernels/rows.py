"""Matrices that hurt a kernel of rows: odd lengths, layouts, storage and values."""

import math

import torch

LAYOUTS = (
    "1x1", "0x7", "3x0", "5x1", "3x2", "7x33", "2x257", "3x1031", "2x2048",
    "every other row", "every other column", "columns of a wider matrix", "transposed", "one element in",
    "one row of many", "one row for all", "one column for all", "3-d",
)  # fmt: skip
"""Names for `layout`."""
SPECIALS = ("nan", "+inf", "-inf", "1e30", "row of -inf", "largest", "row of lowest", "spread")
"""Names for `layout`, of values."""


def layout(name: str, dtype: torch.dtype, device: torch.device, columns: int = 301) -> torch.Tensor:
    """A matrix by name (`RxC`, or one of LAYOUTS or SPECIALS of so many columns), standard normal otherwise.

    The memory around it and in its gaps is NaN, so that what is read beside it shows.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    def within(*shape: int) -> torch.Tensor:
        return torch.full(shape, math.nan, dtype=dtype, device=device)

    if name in SPECIALS:
        return _special(name, normal(5, columns))
    if name in ("3-d", "transposed"):
        return normal(2, 3, columns) if name == "3-d" else normal(columns, 6).t()
    if name[0].isdigit():
        return normal(*map(int, name.split("x")))
    found = {
        "every other row": within(10, columns)[::2],
        "every other column": within(4, 2 * columns)[:, ::2],
        "columns of a wider matrix": within(4, columns + 17)[:, 3:-14],
        "one element in": within(4 * columns + 9)[1:-8].view(4, columns),
        "one row of many": within(9, columns)[4:5],
        "one row for all": within(3, columns)[1:2],
        "one column for all": within(5, 9)[:, 4:5],
    }[name]
    return found.copy_(normal(*found.shape)).expand(5 if name.endswith("for all") else found.shape[0], columns)


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
