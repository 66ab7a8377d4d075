"""Norms of rows by generated kernels: the formulas of PyTorch's operators, and the additions beside them."""

from __future__ import annotations

from operator import getitem

import torch
from torch.fx import Node

from tilewright.kernels.generated import Formula
from tilewright.launch.builder import Operand, RecipeBuilder


def forward(
    call: RecipeBuilder, x: Operand, residual: Operand | None, weight: Operand | None, bias: Operand | None, y: Operand,
    total: Operand | None, mean: Operand, rstd: Operand, eps: float, centered: bool,
) -> None:  # fmt: skip
    """The launch that fills y, total, mean and rstd; as `cuda.forward`."""
    made = Formula(each for each in (x, residual, weight, bias) if each is not None)
    aten, shape = torch.ops.aten, [x.shape[1]]
    source: Operand | Node = x
    results: dict[Node, Operand] = {}
    if total is not None:
        source = made.call(aten.add.Tensor, x, residual, fake=_dense)
        results[source] = total

    def fake(x: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
        return (_dense(x), *(x.new_empty((len(x), 1), dtype=torch.float32) for _ in range(1 + centered)))

    if centered:
        norm = made.call(aten.native_layer_norm.default, source, shape, weight, bias, eps, fake=fake)
    else:
        norm = made.call(aten._fused_rms_norm.default, source, shape, weight, eps, fake=fake)
    for place, result in enumerate((y, mean, rstd) if centered else (y, rstd)):
        results[made.call(getitem, norm, place, fake=getitem)] = result
    made.launch(call, "norm", list(results), list(results.values()))


def backward(
    call: RecipeBuilder, dy: Operand, x: Operand, dsum: Operand | None, weight: Operand | None, mean: Operand,
    rstd: Operand, dx: Operand, d_weight: Operand, d_bias: Operand, centered: bool,
) -> None:  # fmt: skip
    """The launches that fill the gradients; as `cuda.backward`."""
    statistics = [each.as_strided((x.shape[0], 1), (1, 1)) for each in ((mean, rstd) if centered else (rstd,))]
    made = Formula(each for each in (dy, x, dsum, weight, *statistics) if each is not None)
    aten, shape = torch.ops.aten, [x.shape[1]]
    wanted = [gradient.numel() > 0 for gradient in (dx, d_weight, d_bias)[: 2 + centered]]

    def fake(_: object, x: torch.Tensor, *__: object) -> tuple[torch.Tensor, ...]:
        return (_dense(x), *(x.new_empty(shape, dtype=d_weight.dtype) for _ in range(1 + centered)))

    if centered:
        bias = weight if d_bias.numel() else None
        arguments = (dy, x, shape, *statistics, weight, bias, wanted)
        norm = made.call(aten.native_layer_norm_backward.default, *arguments, fake=fake)
    else:
        norm = made.call(aten._fused_rms_norm_backward.default, dy, x, shape, *statistics, weight, wanted, fake=fake)
    gradients = [made.call(getitem, norm, place, fake=getitem) for place in range(len(wanted)) if wanted[place]]
    if dsum is not None:
        gradients[0] = made.call(aten.add.Tensor, gradients[0], dsum, fake=_dense)
    made.launch(call, "norm_backward", gradients, [each for each in (dx, d_weight, d_bias) if each.numel()])


def _dense(x: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty(x.shape)
