"""Which results say nothing about the kernel that computed them.

The contract bounds a result by eager's error. Where a few elements cancel, eager's error is a matter of
luck: a correct implementation, whose every operator rounds within one unit of the last place, misses the
bound too. Such implementations are drawn here; only what they show to be luck is left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tilewright.measure.contract import compare
from tilewright.measure.reference import reference_run
from tilewright.measure.verify import joint_graph, named_tensors, random_tangents
from tilewright.operators.table import row_of
from tilewright.records.measurement import Verified

DRAWS = 6
EXACT = frozenset(
    {"neg", "abs", "relu", "maximum", "minimum", "amax", "amin", "max", "min", "where", "masked_fill", "clone", "clamp"}
    | {"clamp_min", "clamp_max", "threshold_backward", "floor", "ceil", "round", "trunc", "sign", "sgn", "full"}
    | {"full_like", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "scalar_tensor", "empty_like"}
)
"""Operators that round nothing, beside views and copies."""


class Rounded(fx.Interpreter):
    """Runs a graph as an implementation would whose every operator is off by up to one unit of the last place."""

    def __init__(self, module: fx.GraphModule, seed: int) -> None:
        super().__init__(module)
        self.generator = torch.Generator().manual_seed(seed)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().call_function(target, args, kwargs)
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return result
        row = row_of(target)
        copies = row is not None and row.operator_class in ("layout", "library", "random")
        if copies or target._schema.name.removeprefix("aten::") in EXACT:
            return result
        return fx.node.map_aggregate(result, self._rounded)

    def _rounded(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        off = 2 * torch.rand(value.shape, generator=self.generator, dtype=torch.float64) - 1
        return (value.double() * (1 + off * torch.finfo(value.dtype).eps)).to(value.dtype)


def luck(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor], missed: Sequence[Verified], seed: int, training: bool
) -> list[Verified]:
    """Those of `missed`, rows of `verify` out of bounds, that others miss too, and by half as much at least."""
    outputs = [tensor for _, tensor in named_tensors(function(*inputs), "output")]
    tangents = random_tangents([t for t in outputs if t.requires_grad] if training else [], seed)
    joint = joint_graph(function, inputs, tangents, seed=seed, training=training)
    torch.manual_seed(seed)
    pairs = reference_run(joint.graph, joint.inputs)
    drawn: dict[tuple[str, str], list[Verified]] = defaultdict(list)
    for draw in range(DRAWS):
        torch.manual_seed(seed)
        results = Rounded(joint.graph, draw).run(*(t.clone() for t in joint.inputs))
        for name, result, pair in zip(joint.names, results, pairs, strict=True):
            drawn["fwd" if name.startswith("output") else "bwd", name].append(compare(result, pair.eager, pair.truth))
    return [row for row in missed if _is_luck(row, drawn[row.direction, row.tensor])]


def _is_luck(row: Verified, drawn: Sequence[Verified]) -> bool:
    worst, worst_max = max(d.error for d in drawn), max(d.max_error for d in drawn)
    within = row.error <= 2 * worst and row.max_error <= 2 * worst_max
    return within and math.isfinite(row.max_error) and not all(d.ok for d in drawn)
