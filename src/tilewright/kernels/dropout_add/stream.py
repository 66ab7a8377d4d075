"""Masks of dropout from PyTorch's CPU generator: its state before a draw, and the numbers that follow from it.

    mask = empty(N, M).bernoulli_(p)         →   stream = draw_stream([N, M])
                                                 mask = keep(stream, [N, M], order, p)

PyTorch draws serially from MT19937: an element takes two words, and is True where their 53 low bits, as a fraction, are
below p. A stream is int32 [8, 626]. Each row is a state of the generator, so that a thread can begin at any of them:
the last word before a block of 624, the block, and one number, which in row 0 is the word of the block at which the
draw begins and in row 1 the number of blocks between rows. The implementations here fill row 0 only, for graphs that
run without kernels; kernels use `emit/random.h`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import torch
from torch import fx

from tilewright.kernels.registration import define
from tilewright.operators.random import threshold
from tilewright.pytorch.state import in_real_tensors

BLOCK = 624
"""Words of the generator's state."""
SHAPE = (8, BLOCK + 2)
ONE_ROW = 2**30
"""Blocks between rows of a stream that has only one row."""

_LEFT = 2
_WORDS = slice(6, 6 + 2 * BLOCK, 2)
"""Where `torch.Generator.get_state()`, read as int32, holds the words left of the block and (each in 64 bits)
the block; the place of the next word is at 4."""


def _draw_stream(size: Sequence[int]) -> torch.Tensor:
    state = torch.default_generator.get_state()
    torch.empty(list(size), dtype=torch.bool).bernoulli_(0.5)
    words = state.view(torch.int32)
    stream = torch.zeros(SHAPE, dtype=torch.int32)
    stream[0, 1:-1] = words[_WORDS]
    stream[0, -1] = BLOCK + 1 - words[_LEFT]
    stream[1, -1] = ONE_ROW
    return stream


def example_stream(elements: int) -> torch.Tensor:
    """A stream of `draws` numbers with all its rows, not from a generator: for timing kernels that read a stream."""
    stream = torch.randint(1, 2**31 - 1, SHAPE, dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    stream[0, -1] = 0
    stream[1, -1] = 2 * elements // BLOCK // SHAPE[0] + 1
    return stream


def _keep(stream: torch.Tensor, size: Sequence[int], order: Sequence[int], p: float) -> torch.Tensor:
    generator = torch.Generator()
    state = generator.get_state()
    words = state.view(torch.int32)
    words[_WORDS] = stream[0, 1:-1]
    words[_LEFT], words[4] = BLOCK + 1 - stream[0, -1], stream[0, -1]
    generator.set_state(state)
    return _laid_out(size, order).bernoulli_(p, generator=generator)


def _laid_out(size: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """An empty mask whose memory runs along the dimensions in `order`, the last one fastest."""
    strides = [1] * len(size)
    reach = 1
    for dim in reversed(order):
        strides[dim] = reach
        reach = reach * size[dim]
    return torch.empty_strided(size, strides, dtype=torch.bool)


define("draw_stream", _draw_stream, lambda size: torch.empty(SHAPE, dtype=torch.int32))
define("keep", _keep, lambda stream, size, order, p: _laid_out(size, order))
# Graphs call the operators themselves.
draw_stream = torch.ops.tilewright.draw_stream.default
keep = torch.ops.tilewright.keep.default


@cache
def generator_is_known() -> bool:
    """Whether this PyTorch draws by the expected algorithm: compared with Python's MT19937 once per process.

    A build that draws by another library does not (PyTorch with MKL before 2.5). The user's generator is not touched.
    """
    with in_real_tensors():
        generator = torch.Generator().manual_seed(20)
        torch.empty(3, dtype=torch.int32).random_(generator=generator)
        return all(_draws_as_known(generator, p) for p in (0.1, 0.5, 0.9))


def _draws_as_known(generator: torch.Generator, p: float) -> bool:
    """One draw in a transposed layout, over two blocks and into a third; then the state it leaves."""
    left, state = _state(generator)
    twin = random.Random()
    twin.setstate((3, (*state, BLOCK + 1 - left), None))
    below = threshold(p)
    expected = [(twin.getrandbits(32) & 0x1FFFFF) << 32 | twin.getrandbits(32) < below for _ in range(700)]
    mask = torch.empty(35, 20, dtype=torch.bool).t().bernoulli_(p, generator=generator)
    *words, place = twin.getstate()[1]
    return mask.t().flatten().tolist() == expected and _state(generator) == (BLOCK + 1 - place, words)


def _state(generator: torch.Generator) -> tuple[int, list[int]]:
    """How many words of the block are left, and the block."""
    words = generator.get_state().view(torch.int32).tolist()
    return words[_LEFT], [word % 2**32 for word in words[_WORDS]]


@fx.has_side_effect
def keep_mask(like: torch.Tensor, p: float) -> torch.Tensor:
    """The boolean mask that eager dropout with probability `p` would draw now for a tensor like `like`."""
    if like.device.type == "cpu":
        return torch.empty_like(like, dtype=torch.bool).bernoulli_(1 - p)
    # PyTorch numbers the elements of a tensor with gaps in another order.
    alike = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    mask: torch.Tensor = torch.ops.aten.native_dropout(alike, p, True)[1]
    return mask
