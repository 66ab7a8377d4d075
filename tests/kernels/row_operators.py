"""Matrices that hurt a kernel of rows: odd lengths, layouts, storage and values."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.contract import broken
from tests.kernels.losses import targets
from tilewright.bench.catalogue import suite
from tilewright.records.measurement import Verified

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


def layouts(rows: int, columns: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
    """The same values as `contiguous`, `misaligned` (by one element), `strided` rows, `transposed`, `every other`."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, device=device).to(dtype)
    misaligned = torch.zeros(rows * columns + 1, dtype=dtype, device=device)[1:].view(rows, columns)
    strided = torch.zeros(rows, 2 * columns + 3, dtype=dtype, device=device)[:, 1 : columns + 1]
    every_other = torch.zeros(rows, 2 * columns, dtype=dtype, device=device)[:, ::2]
    for target in (misaligned, strided, every_other):
        target.copy_(x)
    transposed = x.t().contiguous().t()
    return {
        "contiguous": x,
        "misaligned": misaligned,
        "strided": strided,
        "transposed": transposed,
        "every other": every_other,
    }


def beside(x: Tensor) -> Tensor:
    """Another matrix of its shape, whose rows lie apart."""
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x
    made = layouts(*flat.shape, x.dtype, str(x.device), seed=1)["strided"]
    return made.unflatten(0, x.shape[:-1]) if x.dim() > 2 else made


def vector(x: Tensor, seed: int = 2) -> Tensor:
    """One number for each column, that begins between 16 bytes."""
    return layouts(1, x.shape[-1], x.dtype, str(x.device), seed)["misaligned"][0]


OPERANDS: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    **{name: lambda x: (x,) for name in ("gelu", "softmax", "log_softmax")},
    "swiglu": lambda x: (x, beside(x)),
    "dropout_add": lambda x: (x, beside(x), 0.3, "silu"),
    "weighted_sum": lambda x: (x, vector(x)),
    "cross_entropy": lambda x: (x, targets(x)),
    "layer_norm": lambda x: (x, vector(x), vector(x, 3)),
    "rms_norm": lambda x: (x, vector(x)),
    "add_layer_norm": lambda x: (x, beside(x), vector(x), vector(x, 3)),
    "add_rms_norm": lambda x: (x, beside(x), vector(x)),
}
"""By suite: its arguments for a matrix."""
NORMS = [name for name in OPERANDS if "norm" in name]
SPECIAL = {
    **dict.fromkeys(("softmax", "log_softmax", "cross_entropy"), SPECIALS),
    **dict.fromkeys(("weighted_sum", "layer_norm", "rms_norm"), ("nan", "+inf", "1e30")),
}
WITHOUT = {"cross_entropy": ("3x0", "3-d")}
"""Cases without a class or without a target for each row."""
CALLS = [
    (name, case)
    for name in OPERANDS
    for case in (*LAYOUTS, *SPECIAL.get(name, ()))
    if case not in WITHOUT.get(name, ())
]
"""Operators, each with the names of its matrices (`rows.layout`)."""


NARROW = 3
"""Columns of fp32 up to which a norm's gradients cancel: their errors are how the last bits of mean and rstd happened
to fall, which `test_gradients_of_narrow_rows` therefore fixes.
"""


def wrong(name: str, x: Tensor, impls: Sequence[str] = ("tilewright",)) -> list[Verified]:
    """Violations of the contract by these implementations of a suite, called on a matrix."""
    operands = [
        value.detach().requires_grad_(value.is_floating_point()) if isinstance(value, Tensor) else value
        for value in OPERANDS[name](x)
    ]
    cancels = name in NORMS and x.dtype == torch.float32 and x.shape[-1] <= NARROW
    functions = (suite(name).variant(impl).function for impl in impls)
    return broken(suite(name), operands, *functions, backward=not cancels)
