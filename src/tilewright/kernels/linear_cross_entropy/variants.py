"""The suite `linear_cross_entropy`: loss and both gradients of a vocabulary's linear layer."""

from __future__ import annotations

import torch

from tilewright.kernels.linear_cross_entropy import linear_cross_entropy
from tilewright.kernels.linear_cross_entropy import peers as chunked
from tilewright.kernels.linear_cross_entropy import reference as plain
from tilewright.kernels.naming import SHORT
from tilewright.kernels.peers import generated, library
from tilewright.records.measurement import Direction
from tilewright.records.suite import Suite, Variant, Work, Workload

BOTH: tuple[Direction, ...] = ("fwd+bwd",)


def workload(sizes: tuple[int, ...], dtype: str) -> Workload:
    """`sizes` is tokens, hidden, vocabulary."""
    tokens, hidden, vocabulary = sizes
    kind: torch.dtype = getattr(torch, dtype)

    def make(device: torch.device, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = torch.randn(tokens, hidden, dtype=kind, device=device, generator=generator)
        weight = torch.empty(vocabulary, hidden, dtype=kind, device=device)
        weight.normal_(std=hidden**-0.5, generator=generator)
        target = torch.randint(0, vocabulary, (tokens,), device=device, generator=generator)
        return x.requires_grad_(), weight.requires_grad_(), target

    # Both matrices and the targets are read, both gradients and the loss written.
    nbytes = (2 * (tokens + vocabulary) * hidden + 1) * kind.itemsize + 8 * tokens
    work = {"fwd+bwd": Work(nbytes, flops=3 * 2 * tokens * hidden * vocabulary, limit="matmul")}
    return Workload(f"{tokens}x{hidden}x{vocabulary} {SHORT[dtype]}", sizes, dtype, make, work)  # type: ignore[arg-type]


SUITES = {
    "linear_cross_entropy": Suite(
        name="linear_cross_entropy",
        summary="cross_entropy(x · weightᵀ, target), the logits never held all at once",
        reference=plain.linear_cross_entropy,
        workload=workload,
        variants=(
            Variant(
                "tilewright",
                "triton",
                linear_cross_entropy,
                note="three products for each chunk of tokens; matrix rate under the power cap",
                directions=BOTH,
            ),
            Variant(
                "eager",
                "torch",
                plain.linear_cross_entropy,
                note="holds all logits, their softmax and its gradient",
                directions=BOTH,
            ),
            generated(plain.linear_cross_entropy, note="holds all logits", directions=BOTH),
            Variant("inductor", "inductor", chunked.in_chunks, note="chunks of 2048 tokens", directions=BOTH),
            library("liger", "liger_kernel", chunked.liger, note="chunks of 256 tokens", directions=BOTH),
        ),
        sizes=((8192, 4096, 131072),),
        dtypes=("bfloat16",),
    )
}
