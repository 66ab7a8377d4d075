"""One matrix of random numbers, lying in memory in each way that a kernel must take."""

import torch


def layouts(rows: int, columns: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
    """The same values as `contiguous`, `misaligned` (by one element), `strided` rows, `transposed`, `every other`."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, device=device).to(dtype)
    misaligned = torch.zeros(rows * columns + 1, dtype=dtype, device=device)[1:].view(rows, columns)
    strided = torch.zeros(rows, 2 * columns + 3, dtype=dtype, device=device)[:, 1 : columns + 1]
    every_other = torch.zeros(rows, 2 * columns, dtype=dtype, device=device)[:, ::2]
    for target in (misaligned, strided, every_other):
        target.copy_(x)
    transposed = x.t().contiguous().t()
    return {
        "contiguous": x,
        "misaligned": misaligned,
        "strided": strided,
        "transposed": transposed,
        "every other": every_other,
    }
