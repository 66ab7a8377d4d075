"""The random numbers of PyTorch's GPU generator in generated Triton kernels (`kernels/dropout_add/generator.py`).

Each call of Philox gives four words, which take most of a draw's instructions. Where an aligned group of four
neighbours lies along the columns, `in_groups` computes one call for it; else `one_by_one` computes a call an element.
A group of eight has two calls: its numbers are then in the registers of the thread that loads eight 16-bit elements,
and do not go through shared memory.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def low(x: tl.tensor) -> tl.tensor:
    """The lower word."""
    return (x & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def philox(
    key0: tl.tensor, key1: tl.tensor, c0: tl.tensor, c1: tl.tensor, c2: tl.tensor, c3: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Philox4x32-10 (Salmon, Moraes, Dror & Shaw, SC 2011): four 32-bit words from key and counter."""
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ key0
        c1 = b.to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ key1
        c3 = a.to(tl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _below(words: tl.tensor, THRESHOLD: tl.constexpr) -> tl.tensor:
    if THRESHOLD == 4294967296:
        return words == words
    else:
        return words < tl.full(words.shape, THRESHOLD, tl.uint32)


@triton.jit
def _words(
    state: tl.tensor, call: tl.tensor, thread: tl.tensor, skip: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The words of call number `call` of each thread; `state` points to seed and offset, which `skip` advances."""
    seed = tl.load(state).to(tl.uint64)
    counter = ((tl.load(state + 1) + skip).to(tl.uint64) >> 2) + call.to(tl.uint64)
    thread = thread.to(tl.uint32)
    return philox(low(seed), low(seed >> 32), low(counter), low(counter >> 32), thread, thread ^ thread)  # type: ignore[no-any-return]


@triton.jit
def in_groups(
    state: tl.tensor, first: tl.tensor, skip: tl.tensor, THRESHOLD: tl.constexpr, VECTOR: tl.constexpr,
    THREADS: tl.constexpr, GROUP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Whether the numbers of elements first … first + GROUP - 1, along the last axis, are below the threshold.

    VECTOR, the elements that a thread of PyTorch's kernel takes at once, is a multiple of GROUP, 4 or 8, and so is each
    `first`.
    """
    # Without a sign a division takes three instructions less.
    first = first.to(tl.uint64 if first.dtype == tl.int64 else tl.uint32)
    chunk = first // VECTOR
    call = chunk // THREADS * (VECTOR // 4) + first % VECTOR // 4
    w0, w1, w2, w3 = _words(state, call, chunk % THREADS, skip)
    if GROUP == 8:
        v0, v1, v2, v3 = _words(state, call + 1, chunk % THREADS, skip)
        even, odd = tl.join(tl.join(w0, v0), tl.join(w2, v2)), tl.join(tl.join(w1, v1), tl.join(w3, v3))
    else:
        even, odd = tl.join(w0, w2), tl.join(w1, w3)
    kept = _below(tl.join(even, odd), THRESHOLD)
    if len(first.shape) == 1:
        return tl.reshape(kept, [first.shape[0] * GROUP])
    else:
        return tl.reshape(kept, [first.shape[0], first.shape[1] * GROUP])


@triton.jit
def one_by_one(
    state: tl.tensor, element: tl.tensor, skip: tl.tensor, THRESHOLD: tl.constexpr, VECTOR: tl.constexpr,
    THREADS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Whether each element's number is below the threshold."""
    chunk = element // VECTOR
    if VECTOR == 1:
        call = chunk // (4 * THREADS)
        word = chunk // THREADS % 4
    else:
        call = chunk // THREADS * max(VECTOR // 4, 1) + element % VECTOR // 4
        word = element % VECTOR % 4
    w0, w1, w2, w3 = _words(state, call, chunk % THREADS, skip)
    return _below(tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3)), THRESHOLD)
