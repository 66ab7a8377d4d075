"""Layer norm and RMS norm over the last dimension, with and without the residual addition before them.

Ba, Kiros and Hinton, "Layer Normalization", 2016; Zhang and Sennrich, "Root Mean Square Layer
Normalization", 2019. Gradients as in `backward_tma.cu`.

On a GPU with thread-block clusters the CUDA C++ kernels run where they take the tensors (`cuda.py`), else generated
ones (`generated.py`); on a CPU, and in float64, PyTorch's operators (`by_torch`), which compute 16 bits in fp32 and
round once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tilewright.kernels.arguments import expect_numbers, expect_tensors
from tilewright.kernels.device import at_least_fp32, runs_triton
from tilewright.kernels.norm import cuda, generated
from tilewright.kernels.norm.cuda import Direction
from tilewright.kernels.registration import define
from tilewright.kernels.row import ELEMENTS, rows_of
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.launch.eager import known_of
from tilewright.launch.gradient import Gradient, HasInput, Input, OutputGrad, Saved
from tilewright.records.recipe import Recipe

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]

FLOAT_EPSILON, DOUBLE_EPSILON = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / √(variance + eps) · weight + bias over the last dimension of `x`.

    `x` [..., columns] in fp32, bf16, fp16 or fp64; `weight` and `bias` [columns], of x's dtype or another
    of these. The result has x's shape and dtype and is contiguous. Rows may lie at any distance from each
    other; another layout is made contiguous first. Sums are fp32 (fp64 for fp64). Differentiable once.
    Raises ValueError for shapes, dtypes or devices that do not fit.

    >>> layer_norm(torch.tensor([[1.0, 2.0, 3.0]]), eps=0.0).round(decimals=4)
    tensor([[-1.2247,  0.0000,  1.2247]])
    """
    return _normalized("layer_norm", x, weight, bias, eps, True)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """x / √(mean of x² + eps) · weight over the last dimension of `x`; otherwise as `layer_norm`.

    `eps` is by default what `torch.nn.functional.rms_norm` takes: the machine epsilon of the dtype that sums have,
    1.19e-7 (2.22e-16 for fp64).

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), eps=0.0).round(decimals=4)
    tensor([[0.8485, 1.1314]])
    """
    return _normalized("rms_norm", x, weight, None, _epsilon(x) if eps is None else eps, False)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """`layer_norm` of x + residual, and x + residual itself, in one pass; the sum is rounded to x's dtype first.

    `residual` has x's shape and dtype; otherwise as `layer_norm`.

    >>> y, total = add_layer_norm(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 2.0]]), eps=0.0)
    >>> y, total
    (tensor([[-1.,  1.]]), tensor([[1., 3.]]))
    """
    _check("add_layer_norm", x, residual, weight, bias)
    expect_numbers("add_layer_norm", eps=eps)
    y, total, _, _ = _add_norm(x, residual, weight, bias, eps, True)
    return y, total


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of x + residual, and x + residual itself; otherwise as `add_layer_norm`."""
    _check("add_rms_norm", x, residual, weight, None)
    expect_numbers("add_rms_norm", eps=eps)
    eps = _epsilon(x) if eps is None else eps
    y, total, _, _ = _add_norm(x, residual, weight, None, eps, False)
    return y, total


def _epsilon(x: Tensor) -> float:
    return DOUBLE_EPSILON if getattr(x, "dtype", None) is torch.float64 else FLOAT_EPSILON


def _normalized(name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
    results = _known_norm(x, weight, bias, eps, centered)
    if results is None:
        _check(name, x, None, weight, bias)
        expect_numbers(name, eps=eps)
        results = _norm(x, weight, bias, eps, centered)
    y: Tensor = results[0]
    return y


def _check(name: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> None:
    expect_tensors(name, x=x, residual=residual, weight=weight, bias=bias)
    known = (*ELEMENTS, torch.float64)
    if x.dim() == 0 or x.dtype not in known:
        raise ValueError(f"{name} takes a tensor [..., columns] of {known}, not {list(x.shape)} {x.dtype}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"{name}: residual {list(residual.shape)} {residual.dtype} must be as x, {list(x.shape)} {x.dtype}"
        )
    for what, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and (vector.shape != x.shape[-1:] or vector.dtype not in known):
            raise ValueError(f"{name}: {what} {list(vector.shape)} {vector.dtype} does not fit x {list(x.shape)}")
    if bias is not None and (weight is None or weight.dtype != bias.dtype):
        raise ValueError(f"{name}: a bias needs a weight of its dtype, {bias.dtype}")
    for other in (residual, weight, bias):
        if other is not None and other.device != x.device:
            raise ValueError(f"{name}: x is on {x.device}, another argument on {other.device}")


def _chosen(
    direction: Direction, matrices: Sequence[Operand], weights: Sequence[Operand | None], has_bias: bool, centered: bool
) -> ModuleType | None:
    """The module whose kernels take these inputs; None where PyTorch's operators do."""
    x = matrices[0]
    if not x.numel() or not runs_triton(x) or any(w is not None and w.dtype not in ELEMENTS for w in weights):
        return None
    if x.is_cuda and cuda.refusal(cuda.call_of(direction, matrices, weights, has_bias, centered), x.device) is None:
        return cuda
    return generated if centered or not has_bias else None


def add_norm_recipe(
    call: RecipeBuilder,
    x: Operand,
    residual: Operand | None,
    weight: Operand | None,
    bias: Operand | None,
    eps: float,
    centered: bool,
) -> Recipe | None:
    """y, x + residual (if there is one), mean (empty unless `centered`) and rstd."""
    if not x.numel():
        return None
    rows, other = rows_of(call, x), None if residual is None else rows_of(call, residual)
    weight, bias = (None if vector is None else call.contiguous(vector) for vector in (weight, bias))
    matrices = (rows,) if other is None else (rows, other)
    kernels = _chosen("forward", matrices, (weight, bias), bias is not None, centered)
    if kernels is None:
        return None
    y, total = call.empty(x.shape, x.dtype), None if residual is None else call.empty(x.shape, x.dtype)
    mean = call.empty((rows.shape[0] if centered else 0,), torch.float32)
    rstd = call.empty(rows.shape[:1], torch.float32)
    kernels.forward(call, rows, other, weight, bias, y, total, mean, rstd, eps, centered)
    return call.finish(y, *(() if total is None else (total,)), mean, rstd)


def backward_recipe(
    call: RecipeBuilder,
    dy: Operand,
    x: Operand,
    dsum: Operand | None,
    weight: Operand | None,
    has_bias: bool,
    mean: Operand,
    rstd: Operand,
    centered: bool,
) -> Recipe | None:
    """dx (plus `dsum`), dweight and dbias, empty where there is no weight, no bias."""
    if not x.numel():
        return None
    rows, incoming = rows_of(call, x), rows_of(call, dy)
    through = None if dsum is None else rows_of(call, dsum)
    weight = None if weight is None else call.contiguous(weight)
    matrices = (rows, incoming) if through is None else (rows, incoming, through)
    kernels = _chosen("backward", matrices, (weight,), has_bias, centered)
    if kernels is None:
        return None
    dtype, columns = x.dtype if weight is None else weight.dtype, rows.shape[1]
    dx = call.empty(x.shape, x.dtype)
    d_weight, d_bias = (call.empty((columns if has else 0,), dtype) for has in (weight is not None, has_bias))
    kernels.backward(call, incoming, rows, through, weight, mean, rstd, dx, d_weight, d_bias, centered)
    return call.finish(dx, d_weight, d_bias)


def _matrix(x: Tensor) -> Tensor:
    """x [..., columns] as a matrix, in the dtype of sums."""
    matrix = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return at_least_fp32(matrix)


def _shaped(matrix: Tensor, like: Tensor) -> Tensor:
    # Not a view: autograd forbids writing to a view that an operator returns.
    shaped: Tensor = torch.ops.aten._unsafe_view.default(matrix.to(like.dtype), like.shape)
    return shaped


def by_torch(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, ...]:
    """y, x + residual (if there is one), mean (empty unless `centered`) and rstd, of each row of x [..., columns]."""
    total = None if residual is None else (x + residual).contiguous()
    values = _matrix(x if total is None else total)
    mean = values.new_empty(0)
    if centered:
        mean = values.mean(1)
        # Add the mean's rounding error: the mean of a row of one value is that value then.
        mean += (values - mean[:, None]).mean(1)
        values = values - mean[:, None]
    rstd = torch.rsqrt(values.square().mean(1) + eps)
    y = values * rstd[:, None]
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return _shaped(y, x), *(() if total is None else (total,)), mean, rstd


def _backward_by_torch(
    dy: Tensor,
    x: Tensor,
    dsum: Tensor | None,
    weight: Tensor | None,
    has_bias: bool,
    mean: Tensor,
    rstd: Tensor,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx (plus `dsum`), dweight and dbias; empty where there is no weight, no bias."""
    incoming = _matrix(dy)
    normal = (_matrix(x) - mean[:, None] if centered else _matrix(x)) * rstd[:, None]
    gradient = incoming if weight is None else incoming * weight
    off = gradient - normal * (gradient * normal).mean(1, keepdim=True)
    off = off - gradient.mean(1, keepdim=True) if centered else off
    dx = off * rstd[:, None] if dsum is None else off * rstd[:, None] + _matrix(dsum)
    dtype = x.dtype if weight is None else weight.dtype
    vectors = (incoming * normal if weight is not None else None), (incoming if has_bias else None)
    d_weight, d_bias = (x.new_empty(0, dtype=dtype) if v is None else v.sum(0).to(dtype) for v in vectors)
    return _shaped(dx, x), d_weight, d_bias


def _fake_add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, ...]:
    rows, dtype = math.prod(x.shape[:-1]), torch.promote_types(x.dtype, torch.float32)
    results = [x.new_empty(x.shape) for _ in range(1 + (residual is not None))]
    return *results, x.new_empty(rows if centered else 0, dtype=dtype), x.new_empty(rows, dtype=dtype)


def _fake_backward(
    dy: Tensor, x: Tensor, dsum: Tensor | None, weight: Tensor | None, has_bias: bool, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    like, columns = x if weight is None else weight, x.shape[-1]
    vectors = (like.new_empty(columns if has else 0) for has in (weight is not None, has_bias))
    return x.new_empty(x.shape), *vectors  # type: ignore[return-value]


def _save_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, bias, _, ctx.centered = inputs
    _, total, *statistics = output
    ctx.save_for_backward(total, weight, *statistics)
    ctx.mark_non_differentiable(*statistics)
    ctx.set_materialize_grads(False)
    ctx.has_bias = bias is not None


def _add_norm_gradients(
    ctx: Any, dy: Tensor | None, dsum: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    total, weight, mean, rstd = ctx.saved_tensors
    # None: no gradient came through that result. Zeros would not do for dy, since 0 * NaN is NaN.
    if dy is None:
        d_weight, d_bias = (torch.zeros_like(weight) if has else None for has in (weight is not None, ctx.has_bias))
        return dsum, dsum, d_weight, d_bias, None, None
    dx, d_weight, d_bias = _backward(dy, total, dsum, weight, ctx.has_bias, mean, rstd, ctx.centered)
    return dx, dx, None if weight is None else d_weight, d_bias if ctx.has_bias else None, None, None


_backward = define("norm_backward", _backward_by_torch, _fake_backward, recipe=backward_recipe)
_norm = define(
    "norm",
    lambda x, *options: by_torch(x, None, *options),
    lambda x, *options: _fake_add_norm(x, None, *options),
    gradient=Gradient(
        _backward,
        (OutputGrad(0), Input(0), None, Input(1), HasInput(2), Saved(1), Saved(2), Input(4)),
        (0, 1, 2, None, None),
    ),
    recipe=lambda call, x, *options: add_norm_recipe(call, x, None, *options),
)
_known_norm = known_of(_norm)
_add_norm = define(
    "add_norm", by_torch, _fake_add_norm, backward=_add_norm_gradients, save=_save_add_norm, recipe=add_norm_recipe
)
