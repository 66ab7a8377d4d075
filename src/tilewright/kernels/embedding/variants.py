"""The suite `embedding`."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tilewright.kernels.embedding import embedding, reference
from tilewright.kernels.naming import SHORT
from tilewright.kernels.peers import generated, inductor, library
from tilewright.records.suite import Suite, Variant, Work, Workload


def workload(sizes: tuple[int, ...], dtype: str) -> Workload:
    """`sizes` is tokens, rows of the table, columns of the table."""
    tokens, entries, columns = sizes
    kind: torch.dtype = getattr(torch, dtype)

    def make(device: torch.device, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        indices = torch.randint(entries, (tokens,), device=device, generator=generator)
        weight = torch.randn(entries, columns, dtype=kind, device=device, generator=generator)
        return indices, weight.requires_grad_()

    taken, table = tokens * columns * kind.itemsize, entries * columns * kind.itemsize
    # A row that two tokens ask for counts twice: it comes from memory again unless a cache still holds it.
    work = {"fwd": Work(2 * taken + 8 * tokens), "bwd": Work(taken + table + 8 * tokens)}
    return Workload(f"{tokens}x{entries}x{columns} {SHORT[dtype]}", sizes, dtype, make, work)  # type: ignore[arg-type]


def _liger(indices: torch.Tensor, weight: torch.Tensor) -> Any:
    from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

    return LigerEmbeddingFunction.apply(weight, indices)


SUITES = {
    "embedding": Suite(
        name="embedding",
        summary="weight[indices]",
        reference=reference.embedding,
        workload=workload,
        variants=(
            Variant("tilewright", "triton", embedding, "memory; backward also the sort of the indices"),
            Variant("torch", "torch", F.embedding, "memory"),
            generated(F.embedding, note="PyTorch's own kernels, called from the compiled program"),
            inductor(F.embedding, note="backward adds with atomics into an fp32 table"),
            library("liger", "liger_kernel", _liger),
        ),
        sizes=((65536, 50257, 4096), (16384, 131072, 4096)),
    )
}
