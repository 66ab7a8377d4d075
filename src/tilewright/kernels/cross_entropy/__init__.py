"""Cross entropy of logits and classes, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tilewright.kernels.arguments import expect_loss_options, expect_tensors
from tilewright.kernels.cross_entropy import formula
from tilewright.kernels.registration import define
from tilewright.kernels.row import rows_of
from tilewright.kernels.row_schedule import kernels_for
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.launch.eager import known_of
from tilewright.launch.gradient import Gradient, Input, OutputGrad, Saved
from tilewright.records.recipe import Recipe

REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    """-log softmax(logits)[target], with `z_loss · logsumexp²` added for each row.

    Args:
        logits: [N, C], floating point, C from 1 to 2³¹ - 1. Rows may have any distance; they are copied first if
            their elements are not adjacent.
        target: [N], any integer dtype: a class in [0, C) or `ignore_index`. On a GPU another value makes
            that row's loss and gradient NaN; on a CPU it is an IndexError.
        ignore_index: rows of this target have neither loss nor gradient and are not counted.
        label_smoothing: ε in [0, 1]: the target's share is 1 - ε + ε / C, every other's ε / C (Szegedy et al.
            2016, "Rethinking the Inception Architecture", section 7).
        z_loss: weight of the squared log-sum-exp (Chowdhery et al. 2022, PaLM, section 5).
        reduction: `mean` over the counted rows (NaN where there are none), `sum`, or `none`.

    Returns:
        The loss in the logits' dtype, [], or [N] for `none`.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit.

    fp32, bf16 and fp16 run tilewright's kernels on a GPU: forward reads the logits once, maximum and sum in fp32
    (Milakov and Gimelshein 2018), backward reads them once more and writes their gradient; neither writes
    probabilities. Other dtypes and CPUs run PyTorch's operators.
    """
    return by_impl(
        logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, reduction=reduction
    )


def by_impl(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, reduction: str = "mean", impl: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """Cross entropy by one of `row_schedule.IMPLS`, forward and backward; raises if that does not support the call."""
    if not (isinstance(logits, torch.Tensor) and isinstance(target, torch.Tensor)):
        expect_tensors("cross_entropy", logits=logits, target=target)
    options = (ignore_index, label_smoothing, z_loss, reduction, False, impl)
    results = _known(logits, target, *options) if target.dtype == torch.int64 else None
    if results is None:
        _check(logits, target)
        expect_loss_options("cross_entropy", REDUCTIONS, ignore_index, label_smoothing, z_loss, reduction)
        results = _forward(logits, target.long(), *options)
    loss: torch.Tensor = results[0]
    return loss


def _check(logits: torch.Tensor, target: torch.Tensor) -> None:
    if logits.dim() != 2 or target.shape != logits.shape[:1] or logits.shape[1] == 0:
        raise ValueError(
            "cross_entropy takes logits [N, C], C at least 1, and target [N], "
            f"not {list(logits.shape)} and {list(target.shape)}"
        )
    if not logits.is_floating_point() or target.is_floating_point() or target.is_complex():
        raise ValueError(
            f"cross_entropy takes floating-point logits and an integer target, not {logits.dtype} and {target.dtype}"
        )
    if logits.device != target.device:
        raise ValueError(
            f"cross_entropy takes logits and target on one device, not {logits.device} and {target.device}"
        )


def _recipe(
    call: RecipeBuilder, logits: Operand, target: Operand, ignored: int, smoothing: float, z_loss: float,
    reduction: str, wide: bool, impl: str,
) -> Recipe | None:  # fmt: skip
    """The recipe of the loss, each row's maximum and log Σ exp(x - maximum) [2, N], and the weight of one row []."""
    dtype = _loss_dtype(logits.dtype, wide, reduction)
    kernels = kernels_for(__name__, logits, impl)
    if kernels is None:
        return None
    rows, target = rows_of(call, logits), call.contiguous(target)
    return call.finish(*kernels.forward(call, rows, target, ignored, smoothing, z_loss, reduction, dtype))


def _by_torch(
    logits: torch.Tensor, target: torch.Tensor, ignored: int, smoothing: float, z_loss: float, reduction: str,
    wide: bool, impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    dtype = _loss_dtype(logits.dtype, wide, reduction)
    return formula.forward(logits, target, ignored, smoothing, z_loss, reduction, dtype)


def _loss_dtype(logits: torch.dtype, wide: bool, reduction: str) -> torch.dtype:
    """The dtype of the loss: fp32 if `wide`, as if the logits had been cast; else theirs. `none` has no wide loss."""
    if wide and reduction == "none":
        raise ValueError("cross_entropy gives the losses of single rows in the dtype of the logits")
    return torch.promote_types(logits, torch.float32) if wide else logits


def _backward_recipe(
    call: RecipeBuilder, gradient: Operand, logits: Operand, target: Operand, statistics: Operand, weight: Operand,
    ignored: int, smoothing: float, z_loss: float, padding: int, impl: str,
) -> Recipe | None:  # fmt: skip
    """The recipe of the gradient of the logits [N, C + padding], whose last `padding` columns are zero."""
    kernels = kernels_for(__name__, logits, impl)
    if kernels is None:
        return None
    rows, columns = logits.shape
    out = call.empty((rows, columns + padding), logits.dtype)
    given = out.as_strided((rows, columns), (columns + padding, 1))
    if padding:
        call.fill(out.as_strided((rows, padding), (columns + padding, 1), columns), 0)
    saved = rows_of(call, logits), call.contiguous(target), statistics, weight
    kernels.backward(call, gradient, *saved, given, ignored, smoothing, z_loss)
    return call.finish(out)


def _backward_by_torch(
    gradient: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, statistics: torch.Tensor, weight: torch.Tensor,
    ignored: int, smoothing: float, z_loss: float, padding: int, impl: str,
) -> torch.Tensor:  # fmt: skip
    found = formula.backward(gradient, logits, target, statistics, weight, ignored, smoothing, z_loss)
    return F.pad(found, (0, padding)) if padding else found


def _loss_fake(
    logits: torch.Tensor, target: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(logits.dtype, torch.float32)
    shape = target.shape if options[3] == "none" else ()
    loss = logits.new_empty(shape, dtype=_loss_dtype(logits.dtype, options[4], options[3]))
    return loss, logits.new_empty((2, logits.shape[0]), dtype=wide), logits.new_empty((), dtype=wide)


_backward = define(
    "cross_entropy_backward",
    _backward_by_torch,
    lambda gradient, logits, *options: logits.new_empty((logits.shape[0], logits.shape[1] + options[-2])),
    recipe=_backward_recipe,
)
_forward = define(
    "cross_entropy",
    _by_torch,
    _loss_fake,
    gradient=Gradient(
        _backward,
        (OutputGrad(0), Input(0), Input(1), Saved(1), Saved(2), Input(2), Input(3), Input(4), 0, Input(7)),
        (0, *[None] * 7),
    ),
    recipe=_recipe,
)
_known = known_of(_forward)
__all__ = ["cross_entropy"]
