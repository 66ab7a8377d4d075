"""Operators that split a random draw from PyTorch's GPU generator into the generator's state and the numbers.

    mask = native_dropout(x, p, True)[1]     →   state = draw_philox(x, advance)
                                                 mask = keep_philox(state, [N, M], order, 1 - p, …)

The state, int64 [2] on the device, is the generator's seed and its offset before the draw. An element's number follows
from the state and the element's place in memory (`kernels/dropout_add/generator.py`), so any kernel can compute it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewright.kernels.dropout_add import generator
from tilewright.kernels.registration import define
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.operators.random import word_threshold
from tilewright.records.recipe import Recipe


def _draw(like: torch.Tensor, advance: int) -> torch.Tensor:
    # While a CUDA graph is captured; else the recipe draws.
    return generator.take_captured(like.device, advance)


def _recipe(call: RecipeBuilder, like: Operand, advance: int) -> Recipe | None:
    from tilewright.kernels.dropout_add.triton import remember

    state = call.empty((2,), torch.int64)
    call.launch(remember, (1,), state, *call.draw(advance), num_warps=1)
    return call.finish(state)


def _keep(
    state: torch.Tensor, size: Sequence[int], order: Sequence[int], p: float, vector: int, threads: int, skip: int
) -> torch.Tensor:
    mask = torch.empty_permuted(list(size), list(order), dtype=torch.bool, device=state.device)
    element = torch.arange(mask.numel(), device=state.device)
    chunk, lane = element // vector, element % vector
    if vector == 1:
        call, word = chunk // (4 * threads), chunk // threads % 4
    else:
        call, word = chunk // threads * max(vector // 4, 1) + lane // 4, lane % 4
    words = generator.words(state, call + skip // 4, chunk % threads)
    kept = words.gather(0, word[None])[0] < word_threshold(p)
    mask.permute(list(order)).copy_(kept.view([size[dim] for dim in order]))
    return mask


define("draw_philox", _draw, lambda like, advance: like.new_empty(2, dtype=torch.int64), recipe=_recipe)
define(
    "keep_philox",
    _keep,
    lambda state, size, order, *_: torch.empty_permuted(size, order, dtype=torch.bool, device=state.device),
)
# Graphs call the operators themselves.
draw_philox = torch.ops.tilewright.draw_philox.default
keep_philox = torch.ops.tilewright.keep_philox.default
