"""Linear layer and cross entropy as one operator that never holds the logits of all tokens."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.kernels.arguments import expect_loss_options, expect_tensors
from tilewright.kernels.by_recipe import by_triton
from tilewright.kernels.linear_cross_entropy import chunks, triton
from tilewright.kernels.registration import define

REDUCTIONS = ("mean", "sum")


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean",
) -> torch.Tensor:  # fmt: skip
    """`cross_entropy(x · weightᵀ, target)`, with `z_loss · logsumexp²` added for each token.

    Args:
        x: [..., hidden], floating point. Made contiguous if its rows are not.
        weight: [vocabulary, hidden], of x's dtype and device.
        target: [...] int64, a column of the logits or `ignore_index`. On a GPU another value makes the loss
            NaN; on a CPU it is an IndexError.
        ignore_index: tokens of this target have neither loss nor gradient and are not counted.
        label_smoothing: ε in [0, 1]: the target's share is 1 - ε + ε / vocabulary, every other's ε / vocabulary.
        z_loss: weight of the squared log-sum-exp (Chowdhery et al. 2022, PaLM, section 5).
        reduction: `mean` over the counted tokens (NaN where there are none) or `sum`.

    Returns:
        The loss, [] in x's dtype.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit.

    Forward computes the gradients with the loss, while a chunk's logits exist: three products in all; recomputing the
    logits in backward would be a fourth. At most 768 MiB of logits exist at once. Backward multiplies the saved
    gradients in place by the incoming gradient and returns them; a second backward through the same graph
    (`retain_graph=True`) computes them anew. Computing gradients in forward is Liger-Kernel's idea (Hsu et al. 2024,
    arXiv:2410.10989).

    Limit: the matrix rate under the power cap. 8192 tokens, hidden 4096, vocabulary 131072 in bf16, forward
    and backward on an H200: 38.7 ms, 683 TFLOP/s; the same chunks by hand under Inductor 46.0 ms, Liger 56.1,
    PyTorch with all logits 41.6 (and 5 GiB more).
    """
    expect_tensors("linear_cross_entropy", x=x, weight=weight, target=target)
    _check(x, weight, target)
    expect_loss_options("linear_cross_entropy", REDUCTIONS, ignore_index, label_smoothing, z_loss, reduction)
    rows = x.reshape(-1, x.shape[-1])
    needs = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, weight)]
    options = (ignore_index, label_smoothing, z_loss, reduction == "mean")
    loss: torch.Tensor = _forward(rows, weight, target.reshape(-1), *options, needs)[0]
    return loss


def _check(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> None:
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or target.shape != x.shape[:-1]:
        raise ValueError(
            "linear_cross_entropy takes x [..., hidden], weight [vocabulary, hidden] and target [...], "
            f"not {list(x.shape)}, {list(weight.shape)} and {list(target.shape)}"
        )
    if x.dtype != weight.dtype or not x.dtype.is_floating_point or target.dtype != torch.int64:
        raise ValueError(
            "linear_cross_entropy takes x and weight of one floating-point dtype and int64 targets, "
            f"not {x.dtype}, {weight.dtype} and {target.dtype}"
        )
    if not x.device == weight.device == target.device:
        devices = f"{x.device}, {weight.device} and {target.device}"
        raise ValueError(f"linear_cross_entropy takes x, weight and target on one device, not {devices}")


def _loss_and_gradients(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float,
    z_loss: float, mean: bool, needs: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    options = (ignore_index, label_smoothing, z_loss, mean, (needs[0], needs[1]))
    return chunks.by_chunks(x.contiguous(), weight.contiguous(), target.contiguous(), *options)


def _fake(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    needs = options[-1]
    gradients = [
        tensor.new_empty(tensor.shape) if needed else tensor.new_empty(0)
        for tensor, needed in zip((x, weight), needs, strict=True)
    ]
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(()), gradients[0], gradients[1], x.new_empty((), dtype=wide)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, target, *options = inputs
    ctx.mark_non_differentiable(*output[1:])
    # Materialised zeros for the gradients of the gradients would take as much memory as the gradients.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, target)
    ctx.options = options
    # Not saved tensors: backward hands them out and drops its reference, so that the caller owns them.
    ctx.gradients = output[1:]


def _backward(ctx: Any, upstream: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    if upstream is None:
        return (None,) * 9
    if torch.is_grad_enabled():
        # For a double backward the gradients must depend on the inputs.
        gradients = _gradients(upstream, *ctx.saved_tensors, *ctx.options)
        return (*(found if need else None for found, need in zip(gradients, ctx.options[-1], strict=True)), *[None] * 6)
    made, ctx.gradients = ctx.gradients, None
    if made is None:
        made = _forward(*ctx.saved_tensors, *ctx.options)[1:]
    *gradients, remaining = made
    factor = upstream.to(remaining.dtype) * remaining
    needed = zip(gradients, ctx.options[-1], strict=True)
    return (*(_scaled(gradient, factor) if need else None for gradient, need in needed), *[None] * 6)


def _scaled_gradients(
    upstream: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    _, dx, dweight, remaining = _loss_and_gradients(x, weight, target, *options)
    factor = upstream.to(remaining.dtype) * remaining
    return (dx * factor).to(x.dtype), (dweight * factor).to(x.dtype)


def _scaled(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    # A traced graph, whose tensors are of a subclass, may not write to a result of forward.
    if type(gradient) is not torch.Tensor:
        return (gradient * factor).to(gradient.dtype)
    _scale(gradient, factor)
    return gradient


_forward = define("linear_cross_entropy", _loss_and_gradients, _fake, backward=_backward, save=_save)
_gradients = define("linear_cross_entropy_backward", _scaled_gradients, lambda upstream, *inputs: _fake(*inputs)[1:3])
_scale = define("scale_gradient_", chunks.scale, lambda gradient, factor: None, recipe=by_triton(triton.scale))
