"""Calls of every operator in the table: what `test_table.py` compiles, runs and compares.

`samples.txt` has the calls; here are the tensors that they read.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

Layout = tuple[tuple[int, ...], tuple[int, ...], str]
LAYOUTS: dict[str, Layout] = {
    "one": ((1,), (1,), "contiguous"),
    "prime": ((7,), (), "contiguous"),
    "matrix": ((3, 5), (5,), "contiguous"),
    "batch": ((4, 1, 33), (4, 6, 1), "contiguous"),
    "scalar": ((), (), "contiguous"),
    "transposed": ((5, 3), (5, 3), "transposed"),
    "gapped": ((6, 9), (6, 1), "gapped"),
    "expanded": ((4, 5, 3), (5, 1), "expanded"),
}
"""Shape of the first operand, shape of the second (they broadcast), and how the first lies in memory."""


def specials(dtype: torch.dtype) -> torch.Tensor:
    """NaN, infinities, zeros, subnormals, the largest, where exp overflows; of integers the extremes."""
    if dtype is torch.bool:
        return torch.tensor([True, False])
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.tensor([info.min, info.max, 0, 1, 2, 3, 7], dtype=dtype)
    limits = torch.finfo(dtype)
    # Just above 88.7 PyTorch's sinh is infinite already, before fp32 is.
    plain = [math.nan, math.inf, 0.0, 1.0, 0.5, 2.5, 3.0, 11.0, 89.5, limits.max, limits.tiny, limits.tiny / 8]
    return torch.tensor([sign * value for value in plain for sign in (1.0, -1.0)], dtype=dtype)


def rows(dtype: torch.dtype) -> torch.Tensor:
    """Rows with a mean and a variance: ordinary, with a NaN, of zeros, of subnormals, all equal, large."""
    x = torch.randn(7, 24, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    x[1, 3], x[2], x[3], x[4], x[5] = math.nan, 0.0, x[3] * torch.finfo(dtype).tiny / 4, 2.0, x[5] * 100
    return x.to(dtype)


@dataclass(frozen=True)
class Operands:
    """Tensors to call an operator with, always the same for one layout and dtype."""

    layout: str
    dtype: torch.dtype

    @property
    def special(self) -> bool:
        return self.layout == "specials"

    @cached_property
    def x(self) -> torch.Tensor:
        """The first operand; of special values, each meets each in `x`, `y`."""
        if self.special:
            values = specials(self.dtype)
            return values.repeat_interleave(len(values)).reshape(len(values), -1)
        shape, _, lies = LAYOUTS[self.layout]
        if lies == "transposed":
            return self._draw(shape[::-1], 1).t()
        if lies == "gapped":
            return self._draw((2 * shape[0], shape[1] + 4), 1)[::2, 3:-1]
        if lies == "expanded":
            return self._draw((shape[0], 1, shape[2]), 1).expand(shape)
        return self._draw(shape, 1)

    @cached_property
    def row(self) -> torch.Tensor:
        """The first operand of what takes moments: squares of its values stay finite.

        What eager's running moments make of an infinity depends on where in the row it meets it.
        """
        return rows(self.dtype) if self.special and self.dtype.is_floating_point else self.x

    @cached_property
    def modest(self) -> torch.Tensor:
        """The first operand without infinities and the largest.

        Eager's GELU gives NaN and Inf there, and its addcmul does not round the product.
        """
        return self.x.clamp(-1e4, 1e4) if self.special and self.dtype.is_floating_point else self.x

    @cached_property
    def y(self) -> torch.Tensor:
        """The second operand, which broadcasts against the first."""
        return self.like if self.special else self._draw(LAYOUTS[self.layout][1], 2)

    @cached_property
    def like(self) -> torch.Tensor:
        """Another operand in the shape of the first."""
        if self.special:
            values = specials(self.dtype)
            return values.repeat(len(values)).reshape(len(values), -1)
        return self._draw(self.x.shape, 3)

    @cached_property
    def mask(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(4)
        return torch.rand(self.x.shape, generator=generator) > 0.4

    @cached_property
    def weight(self) -> torch.Tensor:
        """As long as the last dimension of `row`."""
        return self._draw(self.row.shape[-1:], 5)

    @property
    def last(self) -> list[int]:
        return list(self.row.shape[-1:])

    def of(self, dtype: torch.dtype) -> "Operands":
        """The same of another dtype."""
        return operands(self.layout, dtype)

    @property
    def even(self) -> torch.Tensor:
        """Two of the operand side by side, along both ends."""
        return torch.cat([torch.cat([self.x, self.like], -1)] * 2, 0)

    @property
    def some_hidden(self) -> torch.Tensor:
        """With a row and a column of -inf."""
        x = self.row.clone()
        x[0], x[..., 0] = -math.inf, -math.inf
        return x

    @property
    def extents(self) -> tuple[int, int, int]:
        """Samples, channels, and what is behind them."""
        return self.row.shape[0], self.row.shape[1], math.prod(self.row.shape[2:])

    @property
    def gradient(self) -> torch.Tensor:
        return self.row.nan_to_num(1.0).flip(0).contiguous()

    @property
    def target(self) -> torch.Tensor:
        return self.row.flip(-1) if self.row.dim() else self.like

    @property
    def shares(self) -> torch.Tensor:
        """Between 0 and 1, both included: a GPU stops at any other, and at NaN."""
        return self.row.nan_to_num(0.5).sigmoid() if self.row.is_floating_point() else (self.row > 0).to(self.dtype)

    def positions(self, dim: int) -> torch.Tensor:
        """One position along `dim` for everything else, as the indices of a maximum are."""
        generator = torch.Generator().manual_seed(7)
        shape = list(self.x.shape)
        if not shape:
            return torch.tensor(0)
        extent, shape[dim] = shape[dim], 1
        return torch.randint(extent, shape, generator=generator)

    @property
    def image(self) -> torch.Tensor:
        """[2, 3, 6, 8] of the values of `row`; channels last for some layouts."""
        values = self.row.reshape(-1)
        image = values.repeat(-(-2 * 3 * 6 * 8 // values.numel()))[: 2 * 3 * 6 * 8].reshape(2, 3, 6, 8)
        return image.contiguous(memory_format=torch.channels_last) if len(self.layout) % 2 else image

    @property
    def finite_image(self) -> torch.Tensor:
        """`image` of finite values: eager adds 0 · Inf to a neighbour along an axis that stays as it is."""
        return self.image.clamp(-1e4, 1e4).nan_to_num() if self.special else self.image

    @property
    def volume(self) -> torch.Tensor:
        """`image` as [1, 2, 3, 6, 8]."""
        return self.image.unsqueeze(0)

    @property
    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        _, mean, rstd = torch.ops.aten.native_layer_norm(self.row, self.last, None, None, 1e-5)
        return mean, rstd

    def lengths(self, dim: int) -> torch.Tensor:
        """A positive number for each slice of `row` along a dimension."""
        shape = [1] * self.row.dim()
        shape[dim] = self.row.shape[dim]
        return (torch.rand(shape, generator=torch.Generator().manual_seed(10)) + 0.5).to(self.row.dtype)

    def weight_norm(self, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """A gradient, a weight's direction, its lengths, the norms of the direction, and the dimension.

        A slice has two elements at least: towards a single one the gradient is 0, and eager's is its rounding error.
        """
        place = 1 if dim == 0 else 0
        v, dw = torch.stack([self.row, self.row + self.row], place), torch.stack([self.gradient] * 2, place)
        g = self.lengths(dim).unsqueeze(place)
        dim %= v.dim()
        return dw, v, g, torch.ops.aten._weight_norm_interface(v, g, dim)[1], dim

    @property
    def channels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Two positive numbers for each channel of `row`, its second dimension."""
        generator = torch.Generator().manual_seed(9)
        drawn = torch.rand(2, self.row.shape[1], generator=generator) + 0.5
        return drawn[0].to(self.row.dtype), drawn[1].to(self.row.dtype)

    @property
    def batch_moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        _, mean, rstd = torch.ops.aten.native_batch_norm(self.row, *self.channels, None, None, True, 0.1, 1e-5)
        return mean, rstd

    def _draw(self, shape: tuple[int, ...] | torch.Size, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.dtype is torch.bool:
            return torch.rand(shape, generator=generator) > 0.5
        if self.dtype is torch.float64:
            # The truth is no more exact than eager here, so nothing may cancel.
            return 0.5 + 2 * torch.rand(shape, generator=generator, dtype=torch.float64)
        if self.dtype.is_floating_point:
            return (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(self.dtype)
        low = 0 if self.dtype is torch.uint8 else -9
        return torch.randint(low, 10, shape, generator=generator).to(self.dtype)


operands = cache(Operands)
"""The same tensors for every call, so that calls of one layout and dtype read the same memory."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
Maker = Callable[[Operands], Call]


def call(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def places(extent: int, *shape: int) -> torch.Tensor:
    """Indices below `extent`, some of them several times."""
    return (torch.arange(math.prod(shape)) * 7 % extent).reshape(shape)


def pooled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Maxima of windows of 2 × 3, or of 2 × 2 × 3, with padding along the first axis, and their places."""
    if x.dim() == 4:
        return torch.ops.aten.max_pool2d_with_indices(x, [2, 3], [2, 3], [1, 0], 1, True)  # type: ignore[no-any-return]
    return torch.ops.aten.max_pool3d_with_indices(x, [2, 2, 3], [2, 2, 3], [1, 0, 0], [1, 1, 1], True)  # type: ignore[no-any-return]


def topped(x: torch.Tensor, windows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A gradient of the largest elements of so many windows along each axis, the operand, and their places."""
    axes = x.dim() - 2
    found, places = getattr(torch.ops.aten, f"adaptive_max_pool{axes}d")(x, [windows] * axes)
    return torch.ones_like(found), x, places


NAMES = {
    **vars(torch),
    **{"F": F, "range": range, "inf": math.inf, "call": call, "places": places, "pooled": pooled, "topped": topped},
    "dims": lambda x: list(range(x.dim())),
}


class Attributes(dict[str, Any]):
    """Attributes of operands as the local names of an expression."""

    def __init__(self, of: Operands) -> None:
        super().__init__()
        self.of = of

    def __missing__(self, name: str) -> Any:
        if not hasattr(Operands, name) and name not in ("layout", "dtype"):
            raise KeyError(name)
        return getattr(self.of, name)


def maker(arguments: str) -> Maker:
    code = compile(f"call({arguments.strip()})", "samples.txt", "eval")
    return lambda o: eval(code, NAMES, Attributes(o))  # type: ignore[no-any-return]


def read(text: str) -> dict[str, list[Maker]]:
    """The calls of each overload: lines that are not indented name overloads, those below them have their arguments."""
    text = re.sub(r"^ *#.*\n|^\n", "", text, flags=re.M)
    groups = re.findall(r"((?:^\S.*\n)+)((?:^ .*\n)+)", text, flags=re.M)
    return {name: [*map(maker, calls.splitlines())] for names, calls in groups for name in names.split()}


CALLS, VIEWS = map(read, Path(__file__).with_suffix(".txt").read_text().split("[views]\n"))


def combinations(number: int, variant: int) -> Iterator[Operands]:
    """Layouts and dtypes for variant `variant` of call `number`.

    The first variant of a call meets every kind of dtype, the others two; layouts and integers come in
    turn, so that the table as a whole meets all of them.
    """
    names = list(LAYOUTS)
    layouts = [names[(number + i) % len(names)] for i in range(3)]
    integers = [INTEGERS[(number + i) % len(INTEGERS)] for i in range(3)]
    floats = [
        operands("specials", torch.float32),
        operands(layouts[0], torch.bfloat16),
        operands(layouts[1], torch.float32),
        operands("specials", torch.float16),
        operands(layouts[2], torch.float64),
    ]
    if variant == 0:
        yield from floats
        yield from (operands("specials", integer) for integer in integers[:2])
        yield operands(layouts[0], integers[2])
    else:
        yield floats[variant % len(floats)]
        yield operands(layouts[variant % 3], integers[variant % 3])
