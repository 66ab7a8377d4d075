"""dropout(act(x)) + residual in one pass, forward and backward, with eager's mask, which is not stored.

Srivastava et al., JMLR 15 (2014). On a CUDA device the mask is a function of the generator's seed and offset
(`generator.py`): forward saves these two integers, and backward draws the mask again. Both kernels are generated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from tilewright.kernels.activation import formula, formula_backward
from tilewright.kernels.arguments import expect_numbers, expect_tensors
from tilewright.kernels.by_recipe import perform_part
from tilewright.kernels.device import DTYPES, runs_on_gpu
from tilewright.kernels.dropout_add import generator, philox
from tilewright.kernels.generated import Formula
from tilewright.kernels.registration import define
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.pytorch.state import lies_in_memory
from tilewright.records.recipe import Recipe, dense_strides

KINDS = ("none", "gelu", "gelu_tanh", "silu")
ALIGNED = 16
"""Bytes. PyTorch's allocator aligns every new tensor at least to this."""


def dropout_add(
    x: torch.Tensor, residual: torch.Tensor, p: float = 0.5, *, activation: str = "none", training: bool = True
) -> torch.Tensor:
    """dropout(activation(x), p) + residual: each element dropped with probability p, the others times 1 / (1 - p).

    x and residual have one shape, floating dtype and device, like the result. `activation`: "none", "gelu", "gelu_tanh"
    or "silu". Nothing is dropped unless `training`.

    The mask is the one that `torch.nn.functional.dropout(act(x), p)` would draw from the default generator, which
    advances as far. On a CUDA device (fp32, bf16, fp16) the kernels compute it in both directions; on a CPU, and for
    fp64, PyTorch draws it and it is saved. In a CUDA graph each replay draws anew, as eager's does. Without an
    activation the mask depends on whether x is aligned to 16 bytes, which `torch.compile` assumes. On a GPU a tensor
    with gaps is made contiguous first, a dense one (a transposed matrix) keeps its layout; on a CPU PyTorch computes
    both.

    Raises ValueError for p outside [0, 1], an unknown activation, or shapes, dtypes or devices that differ; TypeError
    for a dtype that is not floating.
    """
    _check(x, residual, p, activation)
    p = float(p) if training else 0.0
    # A program that is compiled on a CPU may be planned for a GPU.
    with_gaps = not (x.is_cuda or x.is_contiguous() or torch.compiler.is_compiling())
    if with_gaps or (x.is_cuda and x.dtype not in DTYPES):
        return torch.nn.functional.dropout(formula(x, activation), p) + residual
    alignment = _alignment(x) if activation == "none" else ALIGNED
    # PyTorch numbers a CUDA tensor's elements in memory order only if a thread takes several of them at once.
    by_one = x.is_cuda and not x.is_contiguous() and generator.vector_of(x.numel(), x.element_size(), alignment) == 1
    if x.is_contiguous() or by_one:
        return _forward_operator(x.contiguous(), residual.contiguous(), p, activation, alignment)[0]  # type: ignore[no-any-return]
    order = _memory_order(x)
    back = [order.index(dim) for dim in range(x.dim())]
    x, residual = x.permute(order).contiguous(), residual.permute(order).contiguous()
    return _forward_operator(x, residual, p, activation, alignment)[0].permute(back)  # type: ignore[no-any-return]


def _check(x: torch.Tensor, residual: torch.Tensor, p: float, activation: str) -> None:
    if not (isinstance(x, torch.Tensor) and isinstance(residual, torch.Tensor)):
        expect_tensors("dropout_add", x=x, residual=residual)
    if not isinstance(p, (int, float)):
        expect_numbers("dropout_add", p=p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout_add takes a probability p in [0, 1], not {p}")
    if activation not in KINDS:
        raise ValueError(f"dropout_add knows the activations {', '.join(KINDS)}, not {activation!r}")
    if not x.is_floating_point():
        raise TypeError(f"dropout_add takes floating-point tensors, not {x.dtype}")
    if (x.shape, x.dtype, x.device) != (residual.shape, residual.dtype, residual.device):
        raise ValueError(
            f"dropout_add takes x and residual of one shape, dtype and device, not {tuple(x.shape)} {x.dtype} on "
            f"{x.device} and {tuple(residual.shape)} {residual.dtype} on {residual.device}"
        )


def _memory_order(x: torch.Tensor) -> list[int]:
    """The dimensions of PyTorch's result for x from the outermost in memory to the innermost.

    By stride, then size; a dimension of stride 0 compares with no other. An insertion sort from the innermost on, like
    `infer_dense_strides` of ATen's ExpandUtils.cpp.
    """
    strides, sizes = x.stride(), x.shape
    order = list(range(x.dim()))
    for first in reversed(range(x.dim() - 1)):
        at = first
        for inner in range(first + 1, x.dim()):
            own, other = order[at], order[inner]
            if 0 in (strides[own], strides[other]):
                continue
            if (strides[own], sizes[own]) >= (strides[other], sizes[other]):
                break
            order[at], order[inner] = other, own
            at = inner
    return order


def _alignment(x: torch.Tensor) -> int:
    """The alignment in bytes that PyTorch's dropout finds for x; one element's size if x has gaps."""
    if not x.is_contiguous() and not x.permute(_memory_order(x)).is_contiguous():
        return x.element_size()
    if torch.compiler.is_compiling() or not _drawn_again(x) or not lies_in_memory(x):
        return ALIGNED
    address = x.data_ptr()
    return min(address & -address, ALIGNED) or ALIGNED


def _drawn_again(x: torch.Tensor | Operand) -> bool:
    """Whether the generated kernels run, which compute the mask again from seed and offset in backward."""
    return x.is_cuda and x.dtype in DTYPES


def _recipe(
    call: RecipeBuilder, x: Operand, residual: Operand, p: float, kind: str, alignment: int,
    captured: Operand | None = None,
) -> Recipe | None:  # fmt: skip
    """dropout(act(x)) + residual, then seed and offset, which are left out if `captured` has them."""
    if not _drawn_again(x):
        return None
    x, residual = _dense(call, x), _dense(call, residual)
    if captured is None and 0.0 < p < 1.0 and x.numel():
        state = philox.draw(call, _geometry(x, alignment).advance)
    else:
        state = captured or call.empty((2,), torch.int64)
    if not x.numel():
        call.fill(state, 0)
        return call.finish(call.empty(x.shape, x.dtype), state)
    made = Formula((x, residual, state))
    value = x if kind == "none" else made.call(torch.ops.tilewright.activation.default, x, kind)
    value = made.call(torch.ops.aten.add.Tensor, _dropped(made, value, x, state, p, alignment), residual)
    (out,) = made.launch(call, "dropout_add", [value])
    return call.finish(out) if captured else call.finish(out, state)


def _backward_recipe(
    call: RecipeBuilder, dout: Operand, x: Operand | None, state: Operand, p: float, kind: str, alignment: int
) -> Recipe | None:
    """dx; x is None where the activation is "none"."""
    if not _drawn_again(dout):
        return None
    if not dout.numel():
        return call.finish(call.empty(dout.shape, dout.dtype))
    dout, x = _dense(call, dout), None if x is None else _dense(call, x)
    made = Formula((dout, state) if x is None else (dout, x, state))
    value = _dropped(made, dout, dout, state, p, alignment)
    if x is not None:
        value = made.call(torch.ops.tilewright.activation_backward.default, value, x, kind)
    return call.finish(*made.launch(call, "dropout_add_backward", [value]))


def _dense(call: RecipeBuilder, x: Operand) -> Operand:
    return call.contiguous(x).as_strided(x.shape, dense_strides(x.shape))


def _dropped(made: Formula, value: Operand | Node, x: Operand, state: Operand, p: float, alignment: int) -> Node:
    """`value` times the factor of each element, 0 where dropped; x is a tensor for which PyTorch would draw."""
    if not 0.0 < p < 1.0:
        return made.call(torch.ops.aten.mul.Tensor, value, 1.0 - p)
    found, order = _geometry(x, alignment), list(range(x.dim()))
    drawn = state, list(x.shape), order, 1.0 - p, found.vector, found.threads, 0
    mask = made.call(philox.keep_philox, *drawn, fake=philox.mask_like)
    return made.call(torch.ops.aten.native_dropout_backward.default, value, mask, generator.scale(p))


def _geometry(x: torch.Tensor | Operand, alignment: int) -> generator.Geometry:
    return generator.geometry_on(x.device, x.numel(), x.element_size(), alignment)


def _forward(
    x: torch.Tensor, residual: torch.Tensor, p: float, kind: str, alignment: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and what backward needs of the draw: seed and offset, or the mask."""
    if not _drawn_again(x):
        mask = drawn_by_pytorch(x, p)
        return formula(x, kind) * _factor(mask, x.dtype, p) + residual, mask
    # A CUDA graph is being captured; else the recipe runs.
    state = generator.take_captured(x.device, _geometry(x, alignment).advance)
    (out,) = perform_part("tilewright::dropout_add", _recipe, x, residual, p, kind, alignment, state)
    return out, state


def drawn_by_pytorch(x: torch.Tensor, p: float) -> torch.Tensor:
    """The mask that `torch.nn.functional.dropout` draws for a tensor like x, bool; the generator advances."""
    if x.is_cuda and 0.0 < p < 1.0 and x.numel():
        return torch.native_dropout(x, p, True)[1]
    return torch.nn.functional.dropout(torch.ones_like(x), p, True) != 0


def _factor(mask: torch.Tensor, dtype: torch.dtype, p: float) -> torch.Tensor:
    return mask.to(dtype) / (1.0 - p) if p < 1.0 else mask.to(dtype)


def _backward(
    dout: torch.Tensor, x: torch.Tensor | None, state: torch.Tensor, p: float, kind: str, alignment: int
) -> torch.Tensor:
    dropped = dout * _factor(state, dout.dtype, p)
    return dropped if x is None else formula_backward(dropped, x, kind)


def _forward_fake(
    x: torch.Tensor, residual: torch.Tensor, p: float, kind: str, alignment: int
) -> tuple[torch.Tensor, torch.Tensor]:
    # A program captured on a CPU may be planned for a GPU.
    drawn_again = runs_on_gpu(x.device) and x.dtype in DTYPES
    state = x.new_empty(2, dtype=torch.int64) if drawn_again else torch.empty_like(x, dtype=torch.bool)
    return torch.empty_like(x, memory_format=torch.contiguous_format), state


_backward_operator = define(
    "dropout_add_backward",
    _backward,
    lambda dout, *_: torch.empty_like(dout, memory_format=torch.contiguous_format),
    recipe=_backward_recipe,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, _, *ctx.options = inputs
    ctx.save_for_backward(None if ctx.options[1] == "none" else x, output[1])


def _gradients(ctx: Any, dout: torch.Tensor, _: None) -> tuple[torch.Tensor | None, ...]:
    dx = _backward_operator(dout, *ctx.saved_tensors, *ctx.options) if ctx.needs_input_grad[0] else None
    return dx, dout, None, None, None


_forward_operator = define("dropout_add", _forward, _forward_fake, backward=_gradients, save=_save, recipe=_recipe)
