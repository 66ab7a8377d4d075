"""The mask of PyTorch's CUDA dropout, number by number in Python's integers: slow, and nothing like the kernels.

Philox4x32-10 from Salmon et al. (SC 2011) and the numbering of ATen's `Dropout.cu`, which an H200 has
confirmed in 480 of 480 cases.
"""

import functools
import struct

import torch

WORD = 2**32 - 1
LANES = 256


@functools.cache
def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds over 32-bit words."""
    (a, b, c, d), (low, high) = counter, key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = right >> 32 ^ b ^ low, right & WORD, left >> 32 ^ d ^ high, left & WORD
        low, high = low + 0x9E3779B9 & WORD, high + 0xBB67AE85 & WORD
    return a, b, c, d


def fp32(x: float) -> float:
    """Rounded to the nearest single-precision number."""
    rounded: float = struct.unpack("f", struct.pack("f", x))[0]
    return rounded


def keeps(word: int, p: float) -> bool:
    """Whether a word keeps its element: cuRAND's uniform number is below 1 - p, both in fp32."""
    return fp32(fp32(word) * 2.0**-32 + 2.0**-33) < fp32(1.0 - p)


def vector_of(count: int, itemsize: int, alignment: int = 16) -> int:
    """Elements that a thread of PyTorch's kernel takes at once."""
    vector = max(min(16, alignment) // itemsize, 1)
    while count % vector:
        vector //= 2
    return vector


def mask(count: int, vector: int, p: float, seed: int, offset: int, most_blocks: int) -> torch.Tensor:
    """The dropout mask of a flat tensor of `count` elements, bool."""
    threads = LANES * min(-(-count // LANES), most_blocks)
    kept = []
    for element in range(count):
        if vector == 1:
            thread, turn = element % threads, element // threads
            call, word = turn // 4, turn % 4
        else:
            thread, turn = element // vector % threads, element // vector // threads
            call, word = turn * max(vector // 4, 1) + element % vector // 4, element % vector % 4
        counter = offset // 4 + call
        words = philox((counter & WORD, counter >> 32, thread & WORD, thread >> 32), (seed & WORD, seed >> 32 & WORD))
        kept.append(keeps(words[word], p))
    return torch.tensor(kept, dtype=torch.bool)
