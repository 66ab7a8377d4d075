"""The embedding: rows of a table by index, and the table's gradient, the same at every run."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.kernels.arguments import expect_tensors, expect_whole_numbers
from tilewright.kernels.device import runs_triton
from tilewright.kernels.embedding import triton
from tilewright.kernels.registration import define
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe

NO_PADDING = -1


def embedding(indices: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """weight[indices]: indices int64 or int32 of any shape, weight[V, D] floating; the result is [*indices, D].

    The row `padding_idx` (from the end if negative) is read as any other and gets no gradient. On a CUDA
    device fp32, bf16 and fp16 run in Triton; the gradient sums in fp32, in the order of the positions, and
    is the same at every run. fp64, and every dtype on a CPU, is computed by PyTorch's operators.

    Raises TypeError for other dtypes, ValueError where weight is no matrix or padding_idx names no row;
    IndexError on a CPU, a device assertion on a GPU, where an index names none.

    >>> embedding(torch.tensor([1, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3., 4.],
            [1., 2.]])
    """
    if not (isinstance(indices, torch.Tensor) and isinstance(weight, torch.Tensor)):
        expect_tensors("embedding", indices=indices, weight=weight)
    if indices.dtype not in (torch.int64, torch.int32) or not weight.is_floating_point():
        raise TypeError(
            f"embedding takes int64 or int32 indices and a floating weight, not {indices.dtype} and {weight.dtype}"
        )
    if weight.dim() != 2 or indices.device != weight.device:
        raise ValueError(
            f"embedding takes indices and weight[V, D] on one device, not {indices.device} and "
            f"{tuple(weight.shape)} on {weight.device}"
        )
    entries = weight.shape[0]
    expect_whole_numbers("embedding", padding_idx=padding_idx)
    if padding_idx is not None and not -entries <= padding_idx < entries:
        raise ValueError(
            f"embedding takes padding_idx in [{-entries}, {entries}), a row of weight, or None, not {padding_idx}"
        )
    padding = NO_PADDING if padding_idx is None else padding_idx % entries
    return _embedding(indices, weight, padding)  # type: ignore[no-any-return]


def _recipe(call: RecipeBuilder, indices: Operand, weight: Operand, padding: int) -> Recipe | None:
    return triton.forward_recipe(call, indices, weight) if runs_triton(weight) else None


def _forward(indices: torch.Tensor, weight: torch.Tensor, padding: int) -> torch.Tensor:
    return torch.nn.functional.embedding(indices, weight)


def _backward(dout: torch.Tensor, indices: torch.Tensor, entries: int, padding: int) -> torch.Tensor:
    if runs_triton(dout):
        # 32-bit keys sort in half the passes.
        keys, order = indices.flatten().to(torch.int32).sort(stable=True)
        return _embedding_sums(dout, keys, order, entries, padding)  # type: ignore[no-any-return]
    positions = torch.arange(indices.numel(), device=indices.device)
    return _sums(dout, indices.flatten(), positions, entries, padding)


def _sums_recipe(
    call: RecipeBuilder, dout: Operand, keys: Operand, order: Operand, entries: int, padding: int
) -> Recipe | None:
    return triton.sums_recipe(call, dout, keys, order, entries, padding) if runs_triton(dout) else None


def _sums(dout: torch.Tensor, keys: torch.Tensor, order: torch.Tensor, entries: int, padding: int) -> torch.Tensor:
    # PyTorch on a CPU adds up in the table's own dtype, which loses digits in 16 bits.
    wide = dout if dout.dtype == torch.float64 else dout.float()
    total = wide.new_zeros(entries, dout.shape[-1])
    total.index_add_(0, keys, wide.reshape(order.numel(), dout.shape[-1])[order])
    if padding != NO_PADDING:
        total[padding] = 0
    return total.to(dout.dtype)


def _added_recipe(
    call: RecipeBuilder, table: Operand, dout: Operand, keys: Operand, order: Operand, padding: int
) -> Recipe | None:
    dense = table.is_contiguous() and table.dtype == dout.dtype
    return triton.added_recipe(call, table, dout, keys, order, padding) if runs_triton(dout) and dense else None


def _add_sums(
    table: torch.Tensor, dout: torch.Tensor, keys: torch.Tensor, order: torch.Tensor, padding: int
) -> torch.Tensor:
    table.add_(_sums(dout, keys, order, table.shape[0], padding))
    return dout.new_empty(0)


def _gradient_fake(dout: torch.Tensor, *options: Any) -> torch.Tensor:
    return dout.new_empty((options[-2], dout.shape[-1]))


def _forward_fake(indices: torch.Tensor, weight: torch.Tensor, padding: int) -> torch.Tensor:
    return weight.new_empty((*indices.shape, weight.shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    indices, weight, ctx.padding = inputs
    ctx.entries = weight.shape[0]
    ctx.save_for_backward(indices)


_embedding_sums = define("embedding_sums", _sums, _gradient_fake, recipe=_sums_recipe)
_add_embedding_sums = define(
    "add_embedding_sums_", _add_sums, lambda table, dout, *_: dout.new_empty(0), recipe=_added_recipe
)
_embedding_backward = define("embedding_backward", _backward, _gradient_fake)
_embedding = define(
    "embedding",
    _forward,
    _forward_fake,
    backward=lambda ctx, dout: (None, _embedding_backward(dout, *ctx.saved_tensors, ctx.entries, ctx.padding), None),
    save=_save,
    recipe=_recipe,
)
