"""Which tiles a program of the Hopper forward owns: a table made on the host, longest tiles first."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

FIXED_BLOCKS = 1.5
"""Cost of a tile beside its key blocks (load of Q, first scores, store), in key blocks."""
GROUP_BYTES = 32 << 20
"""Keys and values of heads that are processed together: they fit into half of an H200's L2."""
HEADS, ROW_BLOCKS = 1 << 15, 1 << 16
"""Limits of an entry of the table, which packs both into 32 bits."""
MOST_TILES = 1 << 16
"""With more tiles a table does not help, and the host needs a tenth of a second to make it."""


@dataclass(frozen=True)
class Span:
    """The tiles of a call: the row blocks of every head, and the keys that each sees."""

    heads: int
    """Over the whole batch."""
    queries: int
    keys: int
    right: int
    """Query i sees keys to i + right."""
    left: int
    """... from i + left."""
    row_block: int
    key_block: int
    banded: bool

    @property
    def row_blocks(self) -> int:
        """Row blocks of a head."""
        return -(-self.queries // self.row_block)

    @property
    def tiles(self) -> int:
        """Row blocks of all heads."""
        return self.heads * self.row_blocks

    def key_blocks(self, row_block: int) -> tuple[int, int]:
        """(first, end) of the key blocks that a row block visits, at least one."""
        if not self.banded:
            return 0, -(-self.keys // self.key_block)
        row = row_block * self.row_block
        end = min(row + self.row_block + self.right, self.keys)
        last = max(-(-end // self.key_block), 1)
        return min(max(row + self.left, 0) // self.key_block, last - 1), last

    def blocks(self, row_block: int) -> int:
        """The number of key blocks that a row block visits."""
        first, last = self.key_blocks(row_block)
        return last - first

    def table_pays(self, programs: int) -> bool:
        """Whether a table pays: tiles differ in length, each program has several, and entries can hold them."""
        fits = self.heads <= HEADS and self.row_blocks <= ROW_BLOCKS and self.tiles <= MOST_TILES
        return self.banded and fits and self.tiles > programs


def table(span: Span, programs: int, head_bytes: int) -> list[int]:
    """The table: programs + 1 offsets of the programs' lists, then the lists, of head · 2¹⁶ + row block.

    List scheduling (Graham): each tile goes to the program with the least work. Heads whose keys and values,
    `head_bytes` each, fit into L2 together form a group; a group's longest tiles come first.
    """
    group = max(1, min(span.heads, GROUP_BYTES // max(head_bytes, 1)))
    cost = [span.blocks(block) + FIXED_BLOCKS for block in range(span.row_blocks)]
    longest = sorted(range(span.row_blocks), key=lambda block: (-cost[block], -block))
    work = [(0.0, program) for program in range(programs)]
    lists: list[list[int]] = [[] for _ in range(programs)]
    for start in range(0, span.heads, group):
        for block in longest:
            for head in range(start, min(start + group, span.heads)):
                busy, program = work[0]
                heapq.heapreplace(work, (busy + cost[block], program))
                lists[program].append(head << 16 | block)
    begins = [programs + 1]
    for tiles in lists:
        begins.append(begins[-1] + len(tiles))
    return begins + [tile for tiles in lists for tile in tiles]
