"""Operators that split a random draw from PyTorch's GPU generator into the generator's state and the numbers.

    mask = native_dropout(x, p, True)[1]     →   state = draw_philox(x, advance)
                                                 mask = keep_philox(state, [N, M], order, 1 - p, …)

The state, int64 [2] on the device, is the generator's seed and its offset before the draw. An element's number follows
from the state and the element's place in memory (`generator.py`), so any kernel can compute it.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tilewright.kernels.dropout_add import generator
from tilewright.kernels.registration import define
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.operators.random import word_threshold
from tilewright.records.recipe import Recipe


@triton.jit(do_not_specialize=["seed", "offset"])
def _remember(state: tl.tensor, seed: tl.int64, offset: tl.int64) -> None:
    """state = (seed, offset), in a kernel of its own: these stores would slow a kernel that draws by 4 to 8 percent."""
    tl.store(state, seed)
    tl.store(state + 1, offset)


def draw(call: RecipeBuilder, advance: int) -> Operand:
    """Seed and offset, int64 [2] on the device, before a draw that advances the generator by `advance`."""
    state = call.empty((2,), torch.int64)
    call.launch(_remember, (1,), state, *call.draw(advance), num_warps=1)
    return state


def _draw(like: torch.Tensor, advance: int) -> torch.Tensor:
    # While a CUDA graph is captured; else the recipe draws.
    return generator.take_captured(like.device, advance)


def _recipe(call: RecipeBuilder, like: Operand, advance: int) -> Recipe | None:
    return call.finish(draw(call, advance))


def mask_like(state: torch.Tensor, size: Sequence[int], order: Sequence[int], *_: object) -> torch.Tensor:
    """An empty mask whose memory runs along the dimensions in `order`, the last one fastest."""
    return torch.empty_permuted(list(size), list(order), dtype=torch.bool, device=state.device)


def _keep(
    state: torch.Tensor, size: Sequence[int], order: Sequence[int], p: float, vector: int, threads: int, skip: int
) -> torch.Tensor:
    mask = mask_like(state, size, order)
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
define("keep_philox", _keep, mask_like)
# Graphs call the operators themselves.
draw_philox = torch.ops.tilewright.draw_philox.default
keep_philox = torch.ops.tilewright.keep_philox.default
