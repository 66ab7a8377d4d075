"""Calls of every operator in the table: what `test_table.py` compiles, runs and compares."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

PADDINGS = ("reflection_pad", "replication_pad")
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


def _places(extent: int, *shape: int) -> torch.Tensor:
    """Indices below `extent`, some of them several times."""
    return (torch.arange(math.prod(shape)) * 7 % extent).reshape(shape)


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


def unary(o: Operands) -> Call:
    return call(o.x)


def binary(o: Operands) -> Call:
    return call(o.x, o.y)


def mixed(other: torch.dtype) -> Maker:
    """A second operand of another dtype."""
    return lambda o: call(o.x, operands(o.layout, other).y)


MIXED = [mixed(dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool)]
NUMBERS: list[Maker] = [lambda o: call(o.x, 2), lambda o: call(o.x, -1.5), lambda o: call(o.x, True)]
ALPHA: list[Maker] = [lambda o: call(o.x, o.y, alpha=3)]
DIMS: list[Maker] = [
    lambda o: call(o.x, [-1]),
    lambda o: call(o.x, [0], True),
    lambda o: call(o.x, list(range(o.x.dim()))),
]
MOMENT_DIMS: list[Maker] = [
    lambda o: call(o.row, [-1]),
    lambda o: call(o.row, [0], True),
    lambda o: call(o.row, list(range(o.row.dim()))),
]
DIM: list[Maker] = [lambda o: call(o.x, -1), lambda o: call(o.x, 0, True)]
LOSS_BACKWARD: list[Maker] = [
    lambda o: call(o.row.sum(), o.row, _target(o), 1, 1.0),
    lambda o: call(_gradient(o), o.row, _target(o), 0, 0.7),
]

UNARY = [
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan",
    "asin", "acos", "atan", "sinh", "cosh", "tanh", "erf", "erfc", "sigmoid", "floor", "ceil", "trunc",
    "round", "sign", "sgn", "isnan", "isinf", "logical_not", "neg", "abs", "reciprocal", "bitwise_not", "relu",
    "silu", "clone", "zeros_like", "ones_like",
]  # fmt: skip
BINARY = [
    "maximum", "minimum", "atan2", "logical_and", "logical_or", "logical_xor", "bitwise_and",
    "bitwise_or", "bitwise_xor",
]  # fmt: skip
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]

CALLS: dict[str, list[Maker]] = {
    **{f"{name}.default": [unary] for name in UNARY},
    **{f"{name}.default" if "bitwise" not in name else f"{name}.Tensor": [binary, *MIXED] for name in BINARY},
    **{f"{name}.Tensor": [binary, *MIXED] for name in COMPARISONS},
    **{f"{name}.Scalar": NUMBERS for name in COMPARISONS},
    "add.Tensor": [binary, *ALPHA, *MIXED],
    "sub.Tensor": [binary, *ALPHA, *MIXED],
    "rsub.Tensor": [binary, *ALPHA],
    "add.Scalar": [*NUMBERS, lambda o: call(o.x, 2, 3)],
    "sub.Scalar": [*NUMBERS, lambda o: call(o.x, 2, 3)],
    "rsub.Scalar": [*NUMBERS, lambda o: call(o.x, 2, 3)],
    "mul.Tensor": [binary, *MIXED],
    "mul.Scalar": NUMBERS,
    "div.Tensor": [binary, *MIXED],
    "div.Scalar": NUMBERS,
    "pow.Tensor_Tensor": [binary],
    "pow.Tensor_Scalar": [lambda o, e=e: call(o.x, e) for e in (2, 3, 4, 1, 0, -1, -2, 0.5, -0.5, 2.0, 1.7)],
    "addcmul.default": [lambda o: call(o.modest, o.y, o.like), lambda o: call(o.modest, o.y, o.like, value=2)],
    "addcdiv.default": [lambda o: call(o.x, o.y, o.like), lambda o: call(o.x, o.y, o.like, value=2)],
    "lerp.Scalar": [lambda o: call(o.x, o.y, 0.3), lambda o: call(o.x, o.y, 0.8)],
    "where.self": [lambda o: call(o.mask, o.x, o.y), lambda o: call(o.mask, o.x, torch.tensor(1.5))],
    "masked_fill.Scalar": [lambda o: call(o.x, o.mask, 2), lambda o: call(o.x, o.mask, -math.inf)],
    "masked_fill.Tensor": [lambda o: call(o.x, o.mask, torch.tensor(3))],
    "clamp.default": [
        lambda o: call(o.x, -1, 2),
        lambda o: call(o.x, None, 1),
        lambda o: call(o.x, 0.5),
        lambda o: call(o.x, 2, 1),
    ],
    "clamp.Tensor": [lambda o: call(o.x, o.y, o.like), lambda o: call(o.x, None, o.y)],
    **{name: [lambda o: call(o.x, 1)] for name in ("clamp_min.default", "clamp_max.default")},
    "threshold_backward.default": [lambda o: call(o.x, o.like, 0), lambda o: call(o.x, o.like, 1.5)],
    "leaky_relu.default": [unary, lambda o: call(o.x, 0.2)],
    "leaky_relu_backward.default": [lambda o: call(o.x, o.like, 0.2, False)],
    "gelu.default": [lambda o: call(o.modest), lambda o: call(o.x, approximate="tanh")],
    "gelu_backward.default": [lambda o: call(o.modest, o.like), lambda o: call(o.modest, o.like, approximate="tanh")],
    "silu_backward.default": [lambda o: call(o.x, o.like)],
    "sigmoid_backward.default": [lambda o: call(o.x, o.like.sigmoid())],
    "tanh_backward.default": [lambda o: call(o.x, o.like.tanh())],
    "softplus.default": [unary, lambda o: call(o.x, 2, 3)],
    "softplus_backward.default": [lambda o: call(o.x, o.like, 1, 20), lambda o: call(o.x, o.like, 2, 3)],
    "native_dropout_backward.default": [lambda o: call(o.x, o.mask, 1.25)],
    "_to_copy.default": [lambda o, d=d: call(o.x, dtype=d) for d in (*FLOATS, *INTEGERS)],
    "full.default": [lambda o: call(list(o.x.shape), 2.5, dtype=o.dtype), lambda o: call(list(o.x.shape), 3)],
    "full_like.default": [lambda o: call(o.x, 1), lambda o: call(o.x, 0.5, dtype=torch.float32)],
    "zeros.default": [lambda o: call(list(o.x.shape), dtype=o.dtype)],
    "ones.default": [lambda o: call(list(o.x.shape), dtype=o.dtype)],
    "new_zeros.default": [lambda o: call(o.x, list(o.x.shape)), lambda o: call(o.x, [3], dtype=torch.int64)],
    "new_ones.default": [lambda o: call(o.x, list(o.x.shape))],
    "new_full.default": [lambda o: call(o.x, [3, 2], 2.5), lambda o: call(o.x, [3, 2], 2, dtype=torch.float32)],
    "scatter.src": [
        lambda o: call(o.x, -1, _positions(o, -1), o.like[..., :1] if o.x.dim() else o.like),
        lambda o: call(o.x, 0, _positions(o, 0), o.like[:1] if o.x.dim() else o.like),
        # Only the first of several sources is taken.
        lambda o: call(o.x, -1, _positions(o, -1), o.like),
    ],
    "scatter.value": [lambda o: call(o.x, -1, _positions(o, -1), 3), lambda o: call(o.x, 0, _positions(o, 0), 1)],
    "scalar_tensor.default": [lambda o: call(2.0, dtype=o.dtype)],
    "arange.start_step": [
        lambda o: call(2, 40, 3, dtype=o.dtype),
        lambda o: call(-1, 1, 0.25, dtype=o.dtype),
        lambda o: call(0, 5),
    ],
    "sum.default": [unary, lambda o: call(o.row, dtype=torch.float32)],
    "sum.dim_IntList": [*DIMS, lambda o: call(o.x, []), lambda o: call(o.x, [-1], dtype=torch.float64)],
    "mean.default": [unary],
    "mean.dim": DIMS,
    "prod.default": [unary],
    "prod.dim_int": DIM,
    **dict.fromkeys(("amax.default", "amin.default"), DIMS),
    **{name: [unary] for name in ("max.default", "min.default")},
    **dict.fromkeys(("max.dim", "min.dim"), DIM),
    **{name: [unary, *DIM] for name in ("argmax.default", "argmin.default")},
    **{name: [unary] for name in ("any.default", "all.default")},
    **dict.fromkeys(("any.dim", "all.dim"), DIM),
    **dict.fromkeys(("any.dims", "all.dims"), DIMS),
    "var.correction": [
        *MOMENT_DIMS,
        lambda o: call(o.row, [-1], correction=0),
        lambda o: call(o.row, None, correction=1, keepdim=True),
    ],
    "std.correction": [*MOMENT_DIMS, lambda o: call(o.row, [-1], correction=0)],
    "var_mean.correction": [*MOMENT_DIMS, lambda o: call(o.row, [0], correction=0, keepdim=True)],
    "logsumexp.default": DIMS,
    "linalg_vector_norm.default": [lambda o, p=p: call(o.x, p, [-1]) for p in (2, 1, 3, 0.5, 0, math.inf, -math.inf)]
    + [unary, lambda o: call(o.x, 2, [0], True)],
    "_softmax.default": [lambda o: call(o.x, -1, False), lambda o: call(o.x, 0, False)],
    "_log_softmax.default": [lambda o: call(o.x, -1, False), lambda o: call(o.x, 0, False)],
    "_softmax_backward_data.default": [lambda o: call(o.x, o.like, -1, o.dtype)],
    "_log_softmax_backward_data.default": [lambda o: call(o.x, o.like, -1, o.dtype)],
    "native_layer_norm.default": [
        lambda o: call(o.row, o.last, o.weight, o.weight, 1e-5),
        lambda o: call(o.row, list(o.row.shape), None, None, 1e-3),
    ],
    "native_layer_norm_backward.default": [
        lambda o: call(_gradient(o), o.row, o.last, *_moments(o), o.weight, o.weight, [True, True, True]),
        lambda o: call(_gradient(o), o.row, o.last, *_moments(o), None, None, [True, False, False]),
    ],
    "_fused_rms_norm.default": [
        lambda o: call(o.row, o.last, o.weight, 1e-5),
        lambda o: call(o.row, o.last, None, None),
    ],
    "arange.default": [lambda o: call(7, dtype=o.dtype), lambda o: call(4.5), lambda o: call(3)],
    "arange.start": [lambda o: call(2, 9, dtype=o.dtype), lambda o: call(-1.5, 4), lambda o: call(3, 8)],
    "_native_batch_norm_legit_no_training.default": [
        lambda o: call(o.row, *_of_channels(o), *_of_channels(o), 0.1, 1e-5),
        lambda o: call(o.row, None, None, *_of_channels(o), 0.1, 1e-3),
    ],
    "_native_batch_norm_legit_functional.default": [
        lambda o: call(o.row, *_of_channels(o), *_of_channels(o), True, 0.1, 1e-5),
        lambda o: call(o.row, None, None, *_of_channels(o), True, 0.3, 1e-3),
    ],
    "_native_batch_norm_legit.no_stats": [
        lambda o: call(o.row, *_of_channels(o), True, 0.1, 1e-5),
        lambda o: call(o.row, None, None, True, 0.3, 1e-3),
    ],
    "native_batch_norm_backward.default": [
        lambda o: call(_gradient(o), o.row, _of_channels(o)[0], None, None, *_batch_moments(o), True, 1e-5, [True] * 3),
        lambda o: call(_gradient(o), o.row, None, None, None, *_batch_moments(o), True, 1e-5, [True, False, False]),
    ],
    "elu.default": [unary, lambda o: call(o.x, 1.67, 1.05), lambda o: call(o.x, 0.7, 1, 1 / 0.7)],
    "elu_backward.default": [
        lambda o: call(o.x, 1.67, 1.05, 1, False, o.like.nan_to_num()),
        lambda o: call(o.x, 0.7, 1, 1 / 0.7, False, o.like.nan_to_num()),
        lambda o: call(o.x, 1.67, 1.05, 1, True, F.elu(o.like.nan_to_num(), 1.67)),
    ],
    "hardsigmoid.default": [unary],
    "hardsigmoid_backward.default": [lambda o: call(o.x, o.like)],
    "hardswish.default": [unary],
    # Of NaN the vectors of PyTorch's kernels for CPUs give another derivative than their remainders.
    "hardswish_backward.default": [lambda o: call(o.x, o.like.nan_to_num())],
    "hardtanh.default": [unary, lambda o: call(o.x, 0, 6)],
    "hardtanh_backward.default": [lambda o: call(o.x, o.like.nan_to_num(), 0, 6)],
    "mish.default": [unary],
    "mish_backward.default": [lambda o: call(o.x, o.like)],
    "_prelu_kernel.default": [lambda o: call(o.x, o.like)],
    "_prelu_kernel_backward.default": [lambda o: call(o.x, o.like, o.like.flip(0) if o.x.dim() else o.like)],
    "mse_loss.default": [lambda o, r=r: call(o.row, _target(o), r) for r in (0, 1, 2)],
    "mse_loss_backward.default": [
        lambda o: call(o.row.sum(), o.row, _target(o), 1),
        lambda o: call(_gradient(o), o.row, _target(o), 0),
    ],
    "smooth_l1_loss.default": [lambda o, r=r: call(o.row, _target(o), r, 0.7) for r in (0, 1, 2)],
    "smooth_l1_loss_backward.default": LOSS_BACKWARD,
    "huber_loss.default": [lambda o, r=r: call(o.row, _target(o), r, 0.7) for r in (0, 1, 2)],
    "huber_loss_backward.default": LOSS_BACKWARD,
    "binary_cross_entropy_with_logits.default": [
        lambda o: call(o.row, _shares(o)),
        lambda o: call(o.row, _shares(o), o.weight, None, 2),
        lambda o: call(o.row, _shares(o), o.weight, o.weight, 0),
    ],
    "binary_cross_entropy.default": [
        lambda o: call(_shares(o), _shares(o).flip(0)),
        lambda o: call(_shares(o), _shares(o).flip(0), o.weight, 0),
    ],
    "binary_cross_entropy_backward.default": [
        lambda o: call(o.row.sum(), _shares(o), _shares(o).flip(0)),
        lambda o: call(_gradient(o), _shares(o), _shares(o).flip(0), o.weight, 0),
    ],
    **{name: [binary] for name in ("clamp_min.Tensor", "clamp_max.Tensor")},
    "lerp.Tensor": [lambda o: call(o.modest, o.y, o.like.clamp(-2, 2))],
    # Unless told, it takes the largest numbers of the dtype, which in float64 are others.
    "nan_to_num.default": [lambda o: call(o.x, 1.5, 3.0, -2.0), lambda o: call(o.x, None, 0.0, 0.0)],
    "fill.Scalar": [lambda o: call(o.x, 2), lambda o: call(o.x, -1.5)],
    "fill.Tensor": [lambda o: call(o.x, torch.tensor(3)), lambda o: call(o.x, torch.tensor(2.5))],
    "copy.default": [
        lambda o: call(o.x, o.like),
        lambda o: call(o.x, o.like[:1]),
        lambda o: call(o.x, o.like.to(torch.bfloat16) if o.x.is_floating_point() else o.like.bool()),
    ],
    "zero.default": [unary],
    "cat.default": [
        lambda o: call([o.x, o.like], -1),
        lambda o: call([o.x, o.like.narrow(0, 0, 1), o.x], 0),
        lambda o: call([o.x.narrow(-1, 0, 1), operands(o.layout, torch.float32).x]),
    ],
    "stack.default": [lambda o: call([o.x, o.like], 0), lambda o: call([o.x, o.like, o.x], -1)],
    "slice_backward.default": [
        lambda o: call(o.x, [*o.x.shape[:-1], o.x.shape[-1] + 3], o.x.dim() - 1, 2, -1, 1),
        lambda o: call(o.x, [o.x.shape[0] + 2, *o.x.shape[1:]], 0, 0, o.x.shape[0], 1),
        lambda o: call(o.x, [2 * o.x.shape[0], *o.x.shape[1:]], 0, 0, 2**63 - 1, 2),
        lambda o: call(o.x, [*o.x.shape[:-1], 3 * o.x.shape[-1] + 1], -1, 2, 2**63 - 1, 3),
    ],
    "select_backward.default": [
        lambda o: call(o.x, [4, *o.x.shape], 0, 2),
        lambda o: call(o.x, [*o.x.shape, 3], o.x.dim(), -1),
    ],
    "constant_pad_nd.default": [
        lambda o: call(o.x, [1, 2]),
        lambda o: call(o.x, [0, 0] * (o.x.dim() - 1) + [2, 0], 1.5),
        lambda o: call(o.x, [1, -1], 2),
    ],
    **{
        f"{name}1d.default": [lambda o: call(_image(o)[0], [2, 3]), lambda o: call(_image(o)[0], [-1, 0])]
        for name in PADDINGS
    },
    **{
        f"{name}2d.default": [lambda o: call(_image(o), [1, 7, 3, 0]), lambda o: call(_image(o)[0], [0, -2, 4, 5])]
        for name in PADDINGS
    },
    **{f"{name}3d.default": [lambda o: call(_image(o).unsqueeze(0), [2, 1, 0, 3, 2, 1])] for name in PADDINGS},
    **{
        f"{name}1d_backward.default": [lambda o: call(_finite_image(o)[0], _image(o)[0, ..., :4], [1, 3])]
        for name in PADDINGS
    },
    **{
        f"{name}2d_backward.default": [
            lambda o: call(_finite_image(o), _image(o)[..., :4, :5], [2, 1, 1, 1]),
            lambda o: call(_finite_image(o)[0], _image(o)[0, ..., :3, :6], [0, 2, 2, 1]),
        ]
        for name in PADDINGS
    },
    **{
        f"{name}3d_backward.default": [
            lambda o: call(_finite_image(o).unsqueeze(0), _image(o).unsqueeze(0)[..., :2, :4, :6], [1, 1, 1, 1, 1, 0])
        ]
        for name in PADDINGS
    },
    "pixel_shuffle.default": [
        lambda o: call(torch.cat([_image(o)] * 4, 1), 2),
        lambda o: call(torch.cat([_image(o)] * 3)[:, 0].unsqueeze(0)[:, :4], 2),
    ],
    "im2col.default": [
        lambda o: call(_image(o), [3, 2], [1, 1], [1, 0], [1, 1]),
        lambda o: call(_image(o)[0], [2, 3], [2, 1], [0, 2], [2, 3]),
    ],
    "col2im.default": [
        lambda o: call(_finite_image(o).reshape(2, 12, 12), [4, 6], [2, 3], [1, 1], [0, 0], [1, 1]),
        lambda o: call(_finite_image(o)[0].reshape(12, 12), [7, 7], [3, 2], [2, 1], [1, 2], [2, 3]),
    ],
    "unfold_backward.default": [
        lambda o: call(_finite_image(o), [2, 3, 13], 2, 8, 1),
        lambda o: call(_finite_image(o), [2, 12, 6], 1, 8, 2),
        lambda o: call(_finite_image(o), [2, 3, 70], -1, 8, 12),
    ],
    "pixel_unshuffle.default": [lambda o: call(_image(o), 2), lambda o: call(_image(o)[0, ..., :6], 3)],
    "flip.default": [lambda o: call(o.x, [-1]), lambda o: call(o.x, list(range(o.x.dim())))],
    "roll.default": [lambda o: call(o.x, [1], [-1]), lambda o: call(o.x, [-2], [0]), lambda o: call(o.x, [1])],
    "repeat.default": [lambda o: call(o.x, [2, *[1] * o.x.dim()]), lambda o: call(o.x, [3] * o.x.dim())],
    **{f"bitwise_{name}.Scalar": [lambda o: call(o.x, 5)] for name in ("and", "or", "xor")},
    "slice_scatter.default": [
        lambda o: call(o.x, o.like.narrow(-1, 0, 1), -1, 1, 2),
        lambda o: call(o.x, operands(o.layout, torch.float32).x.narrow(0, 0, 1), 0, -1),
        lambda o: call(o.x, o.like.narrow(-1, 0, (o.x.shape[-1] + 1) // 2), -1, 0, 2**63 - 1, 2),
    ],
    "select_scatter.default": [
        lambda o: call(o.x, o.like.select(0, 0), 0, -1),
        lambda o: call(o.x, o.like.select(-1, 0), -1, 0),
    ],
    "linspace.default": [
        lambda o: call(-1.5, 2, 7, dtype=o.dtype),
        lambda o: call(0, 1, 1, dtype=o.dtype),
        lambda o: call(3, -3, 2, dtype=o.dtype),
    ],
    "eye.default": [lambda o: call(5, dtype=o.dtype)],
    "eye.m": [lambda o: call(3, 7, dtype=o.dtype), lambda o: call(1, 1)],
    **{name: [unary] for name in ("isneginf.default", "isposinf.default", "frac.default")},
    "pow.Scalar": [lambda o: call(2, o.x), lambda o: call(0.5, o.x)],
    **{name: [binary] for name in ("fmax.default", "fmin.default", "xlogy.Tensor", "logaddexp.default")},
    "floor_divide.default": [lambda o: call(o.x, 3)],
    "floor_divide.Scalar": [lambda o: call(o.x, 3), lambda o: call(o.x, -2)],
    "remainder.Scalar": [lambda o: call(o.x, 3), lambda o: call(o.x, 1)],
    "div.Tensor_mode": [
        lambda o: call(o.x, o.like, rounding_mode="trunc"),
        lambda o: call(o.x, o.like, rounding_mode=None),
        lambda o: call(o.x, 3, rounding_mode="floor"),
    ],
    "div.Scalar_mode": [
        lambda o: call(o.x, 3, rounding_mode="trunc"),
        lambda o: call(o.x, 3, rounding_mode="floor"),
        lambda o: call(o.x, 7, rounding_mode="floor"),
        lambda o: call(o.x, 5, rounding_mode="trunc"),
    ],
    # Windows side by side: others stay PyTorch's on a CPU (`test_table.py`).
    "max_pool2d_with_indices.default": [
        lambda o: call(_image(o), [2, 2]),
        lambda o: call(_image(o), [2, 3], [3, 3], [1, 1]),
        lambda o: call(_image(o), [1, 2], [2, 2], [0, 1], 1, True),
    ],
    "max_pool2d_with_indices_backward.default": [
        lambda o: call(*_pooled(o), _image(o), [2, 3], [2, 3], [1, 0], [1, 1], True, _pooled(o, indices=True))
    ],
    "avg_pool2d.default": [
        lambda o: call(_image(o), [2, 2]),
        lambda o: call(_image(o), [2, 3], [3, 3], [1, 1], True, False),
        lambda o: call(_image(o), [2, 2], [], [1, 1], False, True, 3),
    ],
    "avg_pool2d_backward.default": [
        lambda o: call(*_pooled(o), _image(o), [2, 3], [2, 3], [1, 0], True, True, None),
        lambda o: call(*_pooled(o), _image(o), [2, 3], [2, 3], [1, 0], True, False, None),
        lambda o: call(*_pooled(o), _image(o), [2, 3], [2, 3], [1, 0], True, False, 5),
    ],
    "adaptive_max_pool2d.default": [lambda o: call(_image(o), [1, 1]), lambda o: call(_image(o), [3, 4])],
    "adaptive_max_pool2d_backward.default": [
        lambda o: call(*_topped(_image(o), 1)),
        lambda o: call(*_topped(_image(o), 2)),
    ],
    "_adaptive_avg_pool2d.default": [lambda o: call(_image(o), [3, 4]), lambda o: call(_image(o), [1, 2])],
    "_adaptive_avg_pool2d_backward.default": [lambda o: call(_image(o)[..., ::2, ::2], _image(o))],
    "max_pool3d_with_indices.default": [
        lambda o: call(_volume(o), [1, 2, 2]),
        lambda o: call(_volume(o), [2, 2, 3], [3, 3, 3], [1, 0, 1], [1, 1, 1], True),
    ],
    "max_pool3d_with_indices_backward.default": [
        lambda o: call(
            *_pooled_volume(o),
            _volume(o),
            [2, 2, 3],
            [2, 2, 3],
            [1, 0, 0],
            [1, 1, 1],
            True,
            _pooled_volume(o, indices=True),
        )
    ],
    "avg_pool3d.default": [
        lambda o: call(_volume(o), [2, 2, 2]),
        lambda o: call(_volume(o), [2, 2, 3], [2, 3, 3], [1, 0, 1], True, False),
    ],
    "avg_pool3d_backward.default": [
        lambda o: call(*_pooled_volume(o), _volume(o), [2, 2, 3], [2, 2, 3], [1, 0, 0], True, False, None)
    ],
    "adaptive_max_pool3d.default": [lambda o: call(_volume(o), [1, 1, 1]), lambda o: call(_volume(o), [3, 2, 2])],
    "adaptive_max_pool3d_backward.default": [lambda o: call(*_topped(_volume(o), 1))],
    "_adaptive_avg_pool3d.default": [lambda o: call(_volume(o), [1, 3, 4]), lambda o: call(_volume(o), [1, 1, 1])],
    "_adaptive_avg_pool3d_backward.default": [lambda o: call(_volume(o)[..., ::2, ::2], _volume(o))],
    "upsample_nearest2d.default": [lambda o: call(_image(o), [12, 24]), lambda o: call(_image(o), [6, 24], None, 3.0)],
    "upsample_nearest2d_backward.default": [
        lambda o: call(_image(o), [6, 8], [2, 3, 3, 4]),
        lambda o: call(_image(o), [6, 8], [2, 3, 2, 8], 3.0, None),
    ],
    "upsample_bilinear2d_backward.default": [
        lambda o: call(_finite_image(o), [6, 8], [2, 3, 3, 8], False, None, None),
        lambda o: call(_finite_image(o), [6, 8], [2, 3, 6, 5], True, None, None),
        lambda o: call(_finite_image(o), [6, 8], [2, 3, 6, 5], False, None, 1.7),
    ],
    "_unsafe_index.Tensor": [
        lambda o: call(o.x, [torch.tensor([0, -1, 0])]),
        lambda o: call(_image(o), [None, None, torch.tensor([[5], [0], [2]]), torch.tensor([7, 0, -2, 1])]),
        lambda o: call(_image(o), [None, torch.tensor([[2, 0], [1, 1]])]),
    ],
    "index.Tensor": [
        lambda o: call(o.x, [torch.tensor([0, -1, 0])]),
        lambda o: call(_image(o), [None, torch.tensor([[1], [0]]), None, torch.tensor([7, 0, -2])]),
        lambda o: call(_image(o), [torch.tensor(1, dtype=torch.int32), torch.tensor([2, -3])]),
        lambda o: call(o.x.unsqueeze(0), [torch.tensor([0, -1, 0])]),
    ],
    "embedding.default": [
        lambda o: call(o.x, _places(o.x.shape[0], 2, 3)),
        lambda o: call(o.x, _places(o.x.shape[0], 1, 5).int(), 0),
        lambda o: call(o.x.mT, _places(o.x.shape[-1])),
    ],
    "index_select.default": [
        lambda o: call(o.x, 0, _places(o.x.shape[0], 4)),
        lambda o: call(o.x, -1, _places(o.x.shape[-1], 3).int()),
        lambda o: call(_image(o), 2, _places(5)),
    ],
    "gather.default": [
        lambda o: call(o.x, -1, _places(o.x.shape[-1], *o.x.shape[:-1], 4)),
        lambda o: call(o.x, 0, _places(o.x.shape[0], *o.x.shape)),
        lambda o: call(_image(o), 2, _places(_image(o).shape[2], 1, 2, 7, 3)),
    ],
    "diagonal_scatter.default": [
        lambda o: call(o.x, o.x[0, :3]),
        lambda o: call(_image(o), _image(o)[:, :, 0, :3].sin(), 1, -1, -2),
        lambda o: call(_image(o), _image(o)[:, 0, :, :2].sin(), -1, 3, 1),
        lambda o: call(_image(o), _image(o)[0, 0, :, :1].sin().expand(-1, 2), 5, 0, -1),
    ],
    "diagonal_backward.default": [
        lambda o: call(o.x[0, :3], [3, 7], 2, 0, 1),
        lambda o: call(_image(o)[:, :, 0, :3], [*_image(o).shape[:2], 9, 3], -4, 2, 3),
    ],
    "diag_embed.default": [lambda o: call(o.x), lambda o: call(o.x[0], -2), lambda o: call(o.x, 1, 2, 0)],
    "celu.default": [unary, lambda o: call(o.x, 0.7)],
    "threshold.default": [lambda o: call(o.x, 0.5, 2)],
    "hardshrink.default": [unary, lambda o: call(o.x, 1.5)],
    "softshrink.default": [unary, lambda o: call(o.x, 1.5)],
    **{f"{name}.default": [unary] for name in ("deg2rad", "rad2deg", "sinc")},
    "atanh.default": [lambda o: call(o.x), lambda o: call(o.x.clamp(-0.9, 0.9))],
    "log_sigmoid_forward.default": [unary],
    "log_sigmoid_backward.default": [lambda o: call(o.x, o.like, torch.exp(-o.like.abs()))],
    "logit.default": [lambda o: call(_shares(o)), lambda o: call(o.x, 0.1)],
    "glu.default": [lambda o: call(_even(o)), lambda o: call(_even(o), 0)],
    "glu_backward.default": [
        # Eager rounds the gate to 16 bits: 1 - gate is 0 there, and times an infinite gradient NaN.
        lambda o: call(o.modest, torch.cat([o.like, o.like], -1), -1),
        lambda o: call(o.modest, torch.cat([o.like, o.like], 0), 0),
    ],
    "_safe_softmax.default": [lambda o: call(_some_hidden(o), -1), lambda o: call(_some_hidden(o), 0)],
    "native_group_norm.default": [
        lambda o: call(o.row, *_of_channels(o), *_extents(o), 1, 1e-5),
        lambda o: call(o.row, None, None, *_extents(o), o.row.shape[1], 1e-3),
    ],
    "std_mean.correction": [*MOMENT_DIMS, lambda o: call(o.row, [0], correction=0, keepdim=True)],
    "aminmax.default": [unary, lambda o: call(o.x, dim=-1), lambda o: call(o.x, dim=0, keepdim=True)],
    "count_nonzero.dim_IntList": [lambda o: call(o.x, [-1]), lambda o: call(o.x, [0])],
    **{name: [unary, lambda o: call(o.x, 1), lambda o: call(o.x, -1)] for name in ("tril.default", "triu.default")},
    "_weight_norm_interface.default": [
        lambda o: call(o.row.contiguous(), _lengths(o, 0), 0),
        lambda o: call(o.row.contiguous(), _lengths(o, -1), o.row.dim() - 1),
    ],
    "_weight_norm_interface_backward.default": [
        lambda o: call(*_weight_norm(o, 0)),
        lambda o: call(*_weight_norm(o, -1)),
    ],
    **{
        f"index_{name}.default": [
            lambda o: call(o.x, -1, torch.tensor([o.x.shape[-1] // 2]), o.like[..., :1]),
            lambda o: call(o.x, 0, torch.tensor([0], dtype=torch.int32), o.like[:1]),
            # Several, which a library scatters.
            lambda o: call(o.x, 0, torch.arange(o.x.shape[0]), o.like),
        ]
        for name in ("copy", "add")
    },
}


def _even(o: Operands) -> torch.Tensor:
    """Two of the operand side by side, along both ends."""
    return torch.cat([torch.cat([o.x, o.like], -1)] * 2, 0)


def _some_hidden(o: Operands) -> torch.Tensor:
    """With a row and a column of -inf."""
    x = o.row.clone()
    x[0], x[..., 0] = -math.inf, -math.inf
    return x


def _extents(o: Operands) -> tuple[int, int, int]:
    """Samples, channels, and what is behind them."""
    return o.row.shape[0], o.row.shape[1], math.prod(o.row.shape[2:])


def _gradient(o: Operands) -> torch.Tensor:
    return o.row.nan_to_num(1.0).flip(0).contiguous()


def _target(o: Operands) -> torch.Tensor:
    return o.row.flip(-1) if o.row.dim() else o.like


def _shares(o: Operands) -> torch.Tensor:
    """Between 0 and 1, both included: a GPU stops at any other, and at NaN."""
    return o.row.nan_to_num(0.5).sigmoid() if o.row.is_floating_point() else (o.row > 0).to(o.dtype)


def _positions(o: Operands, dim: int) -> torch.Tensor:
    """One position along `dim` for everything else, as the indices of a maximum are."""
    generator = torch.Generator().manual_seed(7)
    shape = list(o.x.shape)
    if not shape:
        return torch.tensor(0)
    extent, shape[dim] = shape[dim], 1
    return torch.randint(extent, shape, generator=generator)


def _image(o: Operands) -> torch.Tensor:
    """[2, 3, 6, 8] of the values of `o.row`; channels last for some layouts."""
    values = o.row.reshape(-1)
    image = values.repeat(-(-2 * 3 * 6 * 8 // values.numel()))[: 2 * 3 * 6 * 8].reshape(2, 3, 6, 8)
    return image.contiguous(memory_format=torch.channels_last) if len(o.layout) % 2 else image


def _finite_image(o: Operands) -> torch.Tensor:
    """`_image` of finite values: eager adds 0 · Inf to a neighbour along an axis that stays as it is."""
    return _image(o).clamp(-1e4, 1e4).nan_to_num() if o.special else _image(o)


def _pooled(o: Operands, indices: bool = False) -> Any:
    """Results of windows of 2 × 3 with a row of padding."""
    found = torch.ops.aten.max_pool2d_with_indices(_image(o), [2, 3], [2, 3], [1, 0], 1, True)
    return found[1] if indices else (found[0],)


def _topped(x: torch.Tensor, windows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A gradient of the largest elements of so many windows along each axis, the operand, and their places."""
    axes = x.dim() - 2
    found, places = getattr(torch.ops.aten, f"adaptive_max_pool{axes}d")(x, [windows] * axes)
    return torch.ones_like(found), x, places


def _volume(o: Operands) -> torch.Tensor:
    """`_image` as [1, 2, 3, 6, 8]."""
    return _image(o).unsqueeze(0)


def _pooled_volume(o: Operands, indices: bool = False) -> Any:
    """Results of windows of 2 × 2 × 3 with a plane of padding."""
    found = torch.ops.aten.max_pool3d_with_indices(_volume(o), [2, 2, 3], [2, 2, 3], [1, 0, 0], [1, 1, 1], True)
    return found[1] if indices else (found[0],)


def _moments(o: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    _, mean, rstd = torch.ops.aten.native_layer_norm(o.row, o.last, None, None, 1e-5)
    return mean, rstd


def _lengths(o: Operands, dim: int) -> torch.Tensor:
    """A positive number for each slice of `o.row` along a dimension."""
    shape = [1] * o.row.dim()
    shape[dim] = o.row.shape[dim]
    return (torch.rand(shape, generator=torch.Generator().manual_seed(10)) + 0.5).to(o.row.dtype)


def _weight_norm(o: Operands, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """A gradient, a weight's direction, its lengths, the norms of the direction, and the dimension.

    A slice has two elements at least: towards a single one the gradient is 0, and eager's is its rounding error.
    """
    place = 1 if dim == 0 else 0
    v, dw = torch.stack([o.row, o.row + o.row], place), torch.stack([_gradient(o)] * 2, place)
    g = _lengths(o, dim).unsqueeze(place)
    dim %= v.dim()
    return dw, v, g, torch.ops.aten._weight_norm_interface(v, g, dim)[1], dim


def _of_channels(o: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """Two positive numbers for each channel of `o.row`, its second dimension."""
    generator = torch.Generator().manual_seed(9)
    drawn = torch.rand(2, o.row.shape[1], generator=generator) + 0.5
    return drawn[0].to(o.row.dtype), drawn[1].to(o.row.dtype)


def _batch_moments(o: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    _, mean, rstd = torch.ops.aten.native_batch_norm(o.row, *_of_channels(o), None, None, True, 0.1, 1e-5)
    return mean, rstd


VIEWS: dict[str, list[Maker]] = {
    "view.default": [lambda o: call(o.x, [-1]), lambda o: call(o.x, [1, o.x.numel(), 1])],
    "_unsafe_view.default": [lambda o: call(o.x, [o.x.numel(), 1])],
    "reshape.default": [lambda o: call(o.x, [-1])],
    "permute.default": [lambda o: call(o.x, list(reversed(range(o.x.dim()))))],
    "transpose.int": [lambda o: call(o.x, 0, -1)],
    "t.default": [unary],
    "expand.default": [lambda o: call(o.x, [2, *o.x.shape]), lambda o: call(o.x, [2, *(-1 for _ in o.x.shape)])],
    "unsqueeze.default": [lambda o: call(o.x, 0), lambda o: call(o.x, -1)],
    "squeeze.dim": [lambda o: call(o.x, 0), lambda o: call(o.x, -1)],
    "squeeze.dims": [lambda o: call(o.x, list(range(o.x.dim())))],
    "squeeze.default": [unary],
    "alias.default": [unary],
    "detach.default": [unary],
    "lift_fresh_copy.default": [unary],
    "slice.Tensor": [
        lambda o: call(o.x, 0, 0, 2**63 - 1),
        lambda o: call(o.x, -1, -1, 2**63 - 1),
        lambda o: call(o.x, -1, 1, -1),
        lambda o: call(o.x, 0, 1, None, 2),
    ],
    "select.int": [lambda o: call(o.x, 0, 0), lambda o: call(o.x, -1, -1)],
    "unbind.int": [lambda o: call(o.x), lambda o: call(o.x, -1)],
    **{f"{name}.Tensor": [lambda o: call(o.x, 2), lambda o: call(o.x, 2, -1)] for name in ("split", "unsafe_split")},
    **{
        f"{name}.default": [lambda o: call(o.x, [1, o.x.shape[-1] - 1], -1)]
        for name in ("split_with_sizes", "unsafe_split_with_sizes")
    },
    "narrow.default": [lambda o: call(o.x, -1, 1, 1)],
}
"""Layout rows: compiled between two negations, because a view alone is no kernel."""


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
