"""Block widths of generated GPU kernels."""

from __future__ import annotations

from math import prod

NARROWEST = 32
"""The narrowest block if a row has several: two sectors of 16-bit elements."""


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`.

    >>> [power_of_two(n) for n in (1, 5, 64)]
    [1, 8, 64]
    """
    return 1 << max(count - 1, 0).bit_length()


def row_pieces(columns: int) -> tuple[int, int]:
    """In how many blocks of which width, a power of two, a program holds a row: as few as leave few lanes idle.

    >>> [row_pieces(columns) for columns in (197, 768, 1000, 5120)]
    [(1, 256), (3, 256), (1, 1024), (5, 1024)]
    """
    found = [(1, power_of_two(columns))]
    found += [(count, max(power_of_two(-(-columns // count)), NARROWEST)) for count in (3, 5)]
    few = [(count, width) for count, width in found if count * width <= columns + columns // 8]
    return few[0] if few else min(found, key=prod)


def block_width(columns: int, most: int) -> int:
    """Columns of a block: the widest power of two up to `most` that leaves at most an eighth of the lanes idle.

    >>> [block_width(columns, 1024) for columns in (240, 96, 144, 40)]
    [256, 32, 32, 64]
    """
    widest = min(power_of_two(columns), most)
    widths = [widest >> halved for halved in range(widest.bit_length()) if widest >> halved >= NARROWEST]
    lanes = {width: -(-columns // width) * width for width in widths or [widest]}
    few = [width for width, count in lanes.items() if count <= columns + columns // 8]
    return max(few, default=max(lanes, key=lambda width: (-lanes[width], width)))
