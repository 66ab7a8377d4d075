"""The gradient of an embedding: sums of rows by sorted index, the same at every run.

    embedding_sums(dout, keys, order, entries, padding)        [entries, D]: in row e, Σ dout[order[i]] over keys[i] = e
    add_embedding_sums_(table, dout, keys, order, padding)     the same, added to the dense table [entries, D]

keys: the indices, sorted (int16 or int32); order: their positions in dout [*, D]; row `padding` gets no sum (-1: all
do).
fp32, bf16 and fp16 run in Triton on a GPU and sum in fp32, in the order of the positions; the others run in PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.kernels.by_recipe import by_triton
from tilewright.kernels.device import runs_triton
from tilewright.kernels.embedding import triton
from tilewright.kernels.registration import define
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe


def _sums(dout: torch.Tensor, keys: torch.Tensor, order: torch.Tensor, entries: int, padding: int) -> torch.Tensor:
    # PyTorch on a CPU adds up in the table's own dtype, which loses digits in 16 bits.
    wide = dout if dout.dtype == torch.float64 else dout.float()
    total = wide.new_zeros(entries, dout.shape[-1])
    total.index_add_(0, keys.int(), wide.reshape(order.numel(), dout.shape[-1])[order])
    if padding >= 0:
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


def _fake(dout: torch.Tensor, keys: torch.Tensor, order: torch.Tensor, entries: int, padding: int) -> torch.Tensor:
    return dout.new_empty((entries, dout.shape[-1]))


def _added_fake(table: torch.Tensor, dout: torch.Tensor, *_: Any) -> torch.Tensor:
    return dout.new_empty(0)


define("embedding_sums", _sums, _fake, recipe=by_triton(triton.sums_recipe))
define("add_embedding_sums_", _add_sums, _added_fake, recipe=_added_recipe)
