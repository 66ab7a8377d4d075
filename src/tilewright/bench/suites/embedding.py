"""The suite `embedding`."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tilewright.bench.peers import generated, inductor, library
from tilewright.bench.workloads import Draw, workloads
from tilewright.kernels.embedding import embedding, reference
from tilewright.records.measurement import Direction
from tilewright.records.suite import Suite, Variant, Work


def _operands(draw: Draw, tokens: int, entries: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return draw.integers(entries, tokens), draw(entries, columns)


def _work(itemsize: int, tokens: int, entries: int, columns: int) -> dict[Direction, Work]:
    taken, table = tokens * columns * itemsize, entries * columns * itemsize
    # A row that two tokens ask for counts twice: it comes from memory again unless a cache still holds it.
    return {"fwd": Work(2 * taken + 8 * tokens), "bwd": Work(taken + table + 8 * tokens)}


SUITES = {
    "embedding": Suite(
        name="embedding",
        summary="weight[indices]",
        reference=reference.embedding,
        workload=workloads(_operands, _work),
        variants=(
            Variant("tilewright", "triton", embedding, "memory; backward also the sort of the indices"),
            Variant("torch", "torch", F.embedding, "memory"),
            generated(F.embedding, note="PyTorch's own kernels, called from the compiled program"),
            inductor(F.embedding, note="backward adds with atomics into an fp32 table"),
            library(
                "liger",
                "liger_kernel.ops.experimental.embedding:LigerEmbeddingFunction",
                lambda found, indices, weight: found.apply(weight, indices),
            ),
        ),
        sizes=((65536, 50257, 4096), (16384, 131072, 4096)),
    )
}
