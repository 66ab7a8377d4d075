"""Launches of the embedding's kernels: tiles, decided from sizes alone, and grids."""

from __future__ import annotations

import torch
import triton

from tilewright.kernels.device import current
from tilewright.kernels.embedding import triton as kernels
from tilewright.kernels.launches import launch

COLUMNS = 1024
ELEMENTS = 4096
"""Of a tile of the forward: four vectors of 16 bytes for each of 128 threads in 16 bits."""
BACKWARD_COLUMNS = 2048
PART_ROWS = 4
"""Rows of a tile where a long run is summed; most other runs have one row."""
CHUNK = 64
"""Positions of a partial sum of a long run; one program sums a run of up to two chunks."""


def forward_tile(count: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a tile of the forward for `count` positions."""
    wide = min(triton.next_power_of_2(columns), COLUMNS)
    return ELEMENTS // wide if count * columns > ELEMENTS else 1, wide


def forward(indices: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """weight[indices] for contiguous indices and a table whose columns have stride 1."""
    count, columns = indices.numel(), weight.shape[1]
    out = torch.empty((*indices.shape, columns), dtype=weight.dtype, device=weight.device)
    if out.numel():
        high, wide = forward_tile(count, columns)
        with current(weight):
            launch(
                kernels.forward, (triton.cdiv(count, high), triton.cdiv(columns, wide)),
                indices, weight, out, count, weight.shape[0], columns, weight.stride(0),
                ROWS=high, COLUMNS=wide, num_warps=4, debug=True, sanitize_overflow=False,
            )  # fmt: skip
    return out


def backward(dout: torch.Tensor, indices: torch.Tensor, entries: int, padding: int) -> torch.Tensor:
    """dweight[entries, D], summed in the order of the positions; `padding` is -1 without a padding row."""
    columns = dout.shape[-1]
    dweight = torch.empty((entries, columns), dtype=dout.dtype, device=dout.device)
    if dweight.numel():
        # 32-bit keys sort in half the passes.
        keys, order = indices.flatten().to(torch.int32).sort(stable=True)
        bounds = torch.searchsorted(keys, torch.arange(entries + 1, dtype=torch.int32, device=keys.device))
        wide = min(triton.next_power_of_2(columns), BACKWARD_COLUMNS)
        blocks, chunks = triton.cdiv(columns, wide), triton.cdiv(keys.numel(), CHUNK)
        parts = torch.empty((chunks, 2, columns), dtype=torch.float32, device=dout.device)
        sizes = {"CHUNK": CHUNK, "ROWS": PART_ROWS, "COLUMNS": wide, "num_warps": 4}
        with current(dout):
            if chunks > 2:
                kernels.long_runs[chunks, blocks, 2](
                    dout, keys, order, bounds, parts, keys.numel(), columns, padding, **sizes
                )
            kernels.backward[entries, blocks](dout, order, bounds, parts, dweight, columns, padding, **sizes)
    return dweight
