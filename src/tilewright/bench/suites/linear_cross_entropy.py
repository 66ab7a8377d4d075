"""The suite `linear_cross_entropy`: loss and both gradients of a vocabulary's linear layer."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from tilewright.bench.peers import example, generated, library
from tilewright.bench.workloads import Draw, workloads
from tilewright.kernels.linear_cross_entropy import linear_cross_entropy
from tilewright.records.measurement import Direction
from tilewright.records.suite import Suite, Variant, Work


def _operands(draw: Draw, tokens: int, hidden: int, vocabulary: int) -> tuple[torch.Tensor, ...]:
    return draw(tokens, hidden), draw(vocabulary, hidden, std=hidden**-0.5), draw.integers(vocabulary, tokens)


def _work(itemsize: int, tokens: int, hidden: int, vocabulary: int) -> dict[Direction, Work]:
    # Both matrices and the targets are read, both gradients and the loss written.
    nbytes = (2 * (tokens + vocabulary) * hidden + 1) * itemsize + 8 * tokens
    return {"fwd+bwd": Work(nbytes, flops=3 * 2 * tokens * hidden * vocabulary, limit="matmul")}


def _eager(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


VARIANTS = (
    Variant(
        "tilewright",
        "triton",
        linear_cross_entropy,
        note="three products for each chunk of tokens; matrix rate under the power cap",
    ),
    Variant("eager", "torch", _eager, note="holds all logits, their softmax and its gradient"),
    generated(_eager, note="holds all logits"),
    example("inductor", "inductor", "kernels/linear_cross_entropy.py:in_chunks", "chunks of 2048 tokens"),
    library(
        "liger",
        "liger_kernel.ops.fused_linear_cross_entropy:LigerFusedLinearCrossEntropyFunction",
        lambda found, x, weight, target: found.apply(x, weight, target)[0].to(x.dtype),
        note="chunks of tokens",
    ),
    library(
        "liger-cute",
        "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90:liger_fused_linear_cross_entropy_sm90",
        lambda found, x, weight, target: found(x, weight, target).to(x.dtype),
        note="CuTe DSL; keeps the logits' gradient",
    ),
    library(
        "quack",
        "quack.linear_cross_entropy:chunked_linear_cross_entropy",
        lambda found, x, weight, target: found(x, weight, target).to(x.dtype),
        note="CuTe DSL; chunks of 4096 tokens",
    ),
)
SUITES = {
    "linear_cross_entropy": Suite(
        name="linear_cross_entropy",
        summary="cross_entropy(x · weightᵀ, target), the logits never held all at once",
        reference=_eager,
        workload=workloads(_operands, _work),
        variants=tuple(replace(variant, directions=("fwd+bwd",)) for variant in VARIANTS),
        sizes=((8192, 4096, 131072),),
        dtypes=("bfloat16",),
        sources=("kernels/linear_cross_entropy",),
    )
}
