"""The random numbers of PyTorch's CUDA dropout: which one each element gets, and their seed and offset.

`native_dropout` of n elements (ATen/native/cuda/Dropout.cu, checked against it on an H200) runs
T = 256 · min(⌈n/256⌉, multiprocessors · ⌊threads a multiprocessor / 256⌋) threads, each with vectors of V
elements: 16 bytes, less where the input is not aligned or n is no multiple. With Philox4x32-10 keyed by
the seed, element e has

    V > 1:  thread (e/V) mod T, call (e/V)/T · max(V/4, 1) + (e mod V)/4, word e mod V mod 4
    V = 1:  thread e mod T,     call e/(4T),                              word (e/T) mod 4

of the call with counter (offset/4 + call, thread), and is kept where fp32(x·2⁻³² + 2⁻³³) < fp32(1 - p).
e counts elements as they lie in memory where V > 1, in the tensor's own order where V = 1.
The offset then advances by 4·(⌊(n-1)/(4T)⌋ + 1), whatever V. p = 0 and p = 1 draw nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from tilewright.hardware.architectures import DeviceLimits, limits_of
from tilewright.operators.random import word_threshold

LANES = 256
"""Threads of a block of PyTorch's kernel, by which the counters are numbered."""
VECTOR_BYTES = 16
WORD = 2**32 - 1


@dataclass(frozen=True)
class Geometry:
    """How PyTorch's kernel numbers n elements, and how far it advances the generator."""

    vector: int
    """Neighbouring elements of a thread."""
    threads: int
    """Threads for the largest tensors. If fewer run, each has one vector, whose numbers follow from this count too."""
    advance: int
    """Advance of the generator's offset."""


def vector_of(count: int, itemsize: int, alignment: int) -> int:
    """V: neighbouring elements that a thread takes at once."""
    vector = max(min(VECTOR_BYTES, alignment) // itemsize, 1)
    while count % vector:
        vector //= 2
    return vector


def geometry(count: int, itemsize: int, alignment: int, most_blocks: int) -> Geometry:
    """The geometry for `count` > 0 elements of `itemsize` bytes, the first at a multiple of `alignment` bytes."""
    threads = most_blocks * LANES
    return Geometry(vector_of(count, itemsize, alignment), threads, 4 * ((count - 1) // (4 * threads) + 1))


def most_blocks(limits: DeviceLimits) -> int:
    """Blocks of PyTorch's kernel for the largest tensors."""
    return limits.multiprocessors * (limits.max_threads // LANES)


def geometry_on(device: torch.device, count: int, itemsize: int, alignment: int) -> Geometry:
    """`geometry` on a GPU."""
    return geometry(count, itemsize, alignment, most_blocks(limits_of(device)))


def words(state: torch.Tensor, call: torch.Tensor, thread: torch.Tensor) -> torch.Tensor:
    """The four words of each call of Philox4x32-10 (Salmon, Moraes, Dror & Shaw, SC 2011), int64 [4, calls].

    `state`: seed and offset, int64 [2]; `call` and `thread`: int64 [calls].
    """
    seed, offset = state.unbind()
    counter = (offset >> 2) + call
    a, b, c, d = counter & WORD, counter >> 32 & WORD, thread & WORD, thread >> 32
    low, high = seed & WORD, seed >> 32 & WORD
    for _ in range(10):
        (a_high, a_low), (c_high, c_low) = _product(0xD2511F53, a), _product(0xCD9E8D57, c)
        a, b, c, d = c_high ^ b ^ low, c_low, a_high ^ d ^ high, a_low
        low, high = low + 0x9E3779B9 & WORD, high + 0xBB67AE85 & WORD
    return torch.stack([a, b, c, d])


def _product(factor: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low word of a product of two words."""
    upper, lower = factor * (x >> 16), factor * (x & 0xFFFF)
    middle = upper + (lower >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | lower & 0xFFFF


@functools.cache
def threshold(p: float) -> int:
    """The least 32-bit word that drops its element, where elements are dropped with probability `p`."""
    return word_threshold(1.0 - p)


@functools.cache
def scale(p: float) -> float:
    """The factor of kept elements: 1 / (1 - p) in fp32."""
    return float(np.float32(1.0) / np.float32(1.0 - p)) if p < 1.0 else 0.0


def take_captured(device: torch.device, advance: int) -> torch.Tensor:
    """Seed and offset, int64 [2] on the device, in a CUDA graph that is being captured.

    Each replay has its own offset, known only on the device. PyTorch's memory-efficient attention returns it, for its
    backward, and advances the generator by its number of scores, so let one query attend to `advance` keys.
    """
    query = torch.zeros(1, 1, 1, 8, dtype=torch.float16, device=device)
    keys = torch.zeros(1, 1, advance, 8, dtype=torch.float16, device=device)
    attention = torch.ops.aten._scaled_dot_product_efficient_attention
    _, _, seed, offset = attention(query, keys, keys, None, False, 0.5)
    return torch.stack([seed.reshape(()), offset.reshape(())])
