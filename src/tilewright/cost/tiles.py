"""The time of a matrix product by its tiles: the last wave of programs may fill few of the SMs."""

from __future__ import annotations

from functools import lru_cache
from math import sqrt

TILES = tuple(
    (m, n) for m in (64, 96, 128, 192, 256) for n in (64, 96, 128, 160, 192, 256) if m * n <= 128 * 256 + 4096
)
"""Rows × columns of a program's result, as libraries have them."""
FULL_RATE = 256 * 128 / (256 + 128)
"""Multiply-adds for each element loaded at which a tile runs at the full rate; a smaller one waits for operands."""
ATTENTION_ROWS = 128
"""Queries of a program of attention, which loops over all keys for their softmax (Dao, "FlashAttention-2", 2023); in
backward, keys of a program."""
SPLITS = (1, 2, 4, 8, 16)
"""Programs that share one tile, each with a part of K."""
LEAST_DEPTH = 256
"""The least K of a program that shares a tile."""
FILL = 96
"""Part of K (at most a program's K) that passes while a tile waits for its first operands and writes its result."""
SUMMING_US = 1.5
"""Time to sum the parts of tiles that several programs share."""
ALIGNED = 8
"""16-bit elements in 16 bytes, which the copies of tiles and their swizzles move at once."""
UNALIGNED = {1: 4.9, 2: 2.9, 4: 2.8, ALIGNED: 1.0}
"""cuBLAS's least slowdown where rows begin at multiples of so many elements (H200, bf16). 8192 × 50257 × 768 took 6,682
µs forward, 4,528 and 4,296 backward, and 880 aligned; 4096 × 30522 × 768 took 815, and 281 aligned; 4096 × 128100 × 768
took 3,373 and 1,197; 8192 products of 27 × 27 × 64 took 51 to 58, which this predicts as 83, 42 and 42."""


@lru_cache(maxsize=4096)
def product_us(batch: int, m: int, n: int, k: int, TFLOPs: float, sms: int, alignment: int = ALIGNED) -> float:
    """Microseconds of `batch` products [m, k] × [k, n] at a rate of `TFLOPs` of all SMs, by the best of `TILES`.

    `alignment` is a key of `UNALIGNED`. Every wave takes as long as a full one (wave quantisation, NVIDIA, "Matrix
    Multiplication Background").
    """
    best = float("inf")
    for rows, columns in TILES:
        share = min(1.0, sqrt(rows * columns / (rows + columns) / FULL_RATE))
        tiles = batch * -(-m // rows) * -(-n // columns)
        for split in SPLITS:
            depth = -(-k // split)
            if split > 1 and depth < LEAST_DEPTH:
                break
            waves = -(-tiles * split // sms)
            us = waves * 2 * rows * columns * (depth + min(depth, FILL)) * sms / (TFLOPs * 1e6 * share)
            best = min(best, us + SUMMING_US * (split > 1))
    return best * UNALIGNED[alignment]


def attention_share(product: tuple[int, int, int, int], flops: int, sms: int) -> float:
    """The time of an attention's tiles over that of its `flops` at the full rate of all SMs.

    `product`: as `cost/products.py` counts it. The last tile of a head is padded, and the last programs are alone on
    their SMs and take about twice as long.
    """
    heads, rows, width, depth = product
    tiles = heads * -(-rows // ATTENTION_ROWS)
    return 2 * tiles * ATTENTION_ROWS * width * depth / flops * (1 + sms / tiles)
