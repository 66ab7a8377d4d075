"""Encodes columns of integers for the page: LEB128, then base64.

A timeline is mostly small numbers (distances between neighbours, indices of frequent names), which take one to
three bytes each in LEB128 (DWARF 5, section 7.6) where JSON would take two to ten.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BITS = 7


def pack(values: NDArray[Any]) -> str:
    """Encode non-negative integers below 2**63, each in as few bytes as possible.

    >>> pack(np.array([0, 127, 128, 300]))
    'AH+AAawC'
    """
    return b64encode(leb128(values)).decode("ascii")


def leb128(values: NDArray[Any]) -> bytes:
    """`values` in LEB128: low bits first, seven per byte; a set top bit means that more bytes follow."""
    rest = np.asarray(values, dtype=np.uint64).ravel().copy()
    if not rest.size:
        return b""
    sizes = np.ones(rest.size, dtype=np.int64)
    larger = rest >> np.uint64(_BITS)
    while larger.any():
        sizes += larger > 0
        larger >>= np.uint64(_BITS)
    first = np.cumsum(sizes) - sizes
    out = np.zeros(int(sizes.sum()), dtype=np.uint8)
    for place in range(int(sizes.max())):
        here = sizes > place
        more = (sizes[here] > place + 1).astype(np.uint8) << 7
        out[first[here] + place] = (rest[here] & np.uint64(0x7F)).astype(np.uint8) | more
        rest >>= np.uint64(_BITS)
    return out.tobytes()


def zigzag(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Signed integers as unsigned ones, small for those near zero.

    >>> zigzag(np.array([0, -1, 1, -2])).tolist()
    [0, 1, 2, 3]
    """
    signed = np.asarray(values, dtype=np.int64)
    return ((signed << 1) ^ (signed >> 63)).astype(np.uint64)
