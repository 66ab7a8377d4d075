"""On a GPU, splits a sum over samples and pixels of values normalised per sample: first over pixels, then over samples.

    dx = (g - level[n, c] - (x - mean[n, c]) · tilt[n, c]) · scale[n, c]     [N, C, …], channels-last
    db = Σ_(n, places) dx          →          db = Σ_n (Σ_places dx)

In one nest, samples and pixels would be rows and channels columns: each element would load the moments again, and all
programs would prefetch the same lines of L2. An instance norm's gradient with the bias gradient of the convolution
before it, 2 × 32 × 64³ in bf16, took 900 µs on an H200; its traffic takes 32. With sample and channel as columns a
program loads the moments once. The second sum is over [N, C].

Runs on the partitioned graphs, in which norms are formulas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from tilewright.graph.calls import arguments, class_of, nbytes, through
from tilewright.graph.insert import insert_formula
from tilewright.passes.convolution.memory_formats import lies_channels_last
from tilewright.passes.rule import call, rule, triton

aten = torch.ops.aten
LEAST_BYTES = 2**20
"""Bytes; smaller operands take hardly longer than the launch of the second sum."""
MOST_OPERATORS = 48
"""How many operators of the producing kernel are examined at most."""


def _by_sample(x: Tensor, dtype: torch.dtype) -> Tensor:
    wide = dtype if dtype == torch.float64 else torch.float32
    return x.sum(list(range(2, x.dim())), dtype=wide).sum(0).to(dtype)


def _is_by_channel(node: fx.Node, x: fx.Node) -> bool:
    """Whether this sums several samples of a large channels-last tensor of floats, one result a channel."""
    value: Any = x.meta["val"]
    if not all(isinstance(size, int) for size in value.shape) or not value.is_floating_point() or value.dim() <= 2:
        return False
    given: Any = arguments(node)
    dims = {dim % value.dim() for dim in given["dim"] or range(value.dim())}
    by_channel = dims == set(range(value.dim())) - {1} and not given["keepdim"]
    several = value.shape[0] > 1 and value.shape[2:].numel() > 1
    laid = lies_channels_last(_before_copies(x).meta["val"])
    return by_channel and several and nbytes(x) >= LEAST_BYTES and laid and _reads_moments_of_samples(x)


def _before_copies(x: fx.Node) -> fx.Node:
    return through(x, lambda node: node.target is aten.clone.default)


def _reads_moments_of_samples(x: fx.Node) -> bool:
    """Whether the pointwise operators that compute `x` read a tensor with values per sample but not per pixel."""
    samples, channels = x.meta["val"].shape[:2]
    todo, known = [x], {x}
    while todo and len(known) <= MOST_OPERATORS:
        node = todo.pop()
        if class_of(node) not in ("pointwise", "layout"):
            continue
        for operand in node.all_input_nodes:
            value = operand.meta["val"]
            if operand in known or not isinstance(value, Tensor):
                continue
            todo.append(operand)
            known.add(operand)
            # An operand with fewer axes broadcasts along the samples.
            of_samples = value.dim() > 1 and value.dim() == node.meta["val"].dim() and value.shape[0] == samples
            if of_samples and value.numel() <= samples * channels:
                return True
    return False


@rule(call(aten.sum.dim_IntList, "x", ...), on=triton, where=_is_by_channel)
def sum_samples_last(node: fx.Node, x: fx.Node) -> Any:
    return insert_formula(node, _by_sample, x, node.meta["val"].dtype)
