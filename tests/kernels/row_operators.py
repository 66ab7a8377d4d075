"""Operators of rows on matrices that hurt: what breaks the numbers contract, by any implementation on any device."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.kernels.layouts import layouts
from tests.kernels.losses import targets
from tests.kernels.rows import LAYOUTS, SPECIALS
from tests.proving import broken
from tilewright.bench.catalogue import suite
from tilewright.records.measurement import Verified


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
