"""Computes the result of a batch or group norm from its moments, so that backward can recompute it.

    y, mean, rstd = batch_norm(x, w, b)       →    _, mean, rstd = batch_norm(x, w, b)
    g = silu_backward(dy, y)                       y = (x - mean) · (rstd · w) + b
                                                   g = silu_backward(dy, y)

The norm's gradient reads x, mean and rstd anyway, and backward recomputes y from these without more memory traffic. An
EfficientNet block then saves one tensor less for each norm, of four.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from tilewright.graph.insert import insert_call, insert_formula
from tilewright.hardware.target import Target
from tilewright.passes.norm.group import normalised as group_normalised
from tilewright.passes.norm.split import is_by_columns, normalised
from tilewright.passes.rule import call, rule

BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
GROUP_NORM = torch.ops.tilewright.group_norm.default


def _keeps_its_moments(norm: Node, x: Node, target: Target) -> bool:
    """Whether the moments are wider than 16 bits, as they always are on a GPU, and stand for the result."""
    is_split = norm.target is GROUP_NORM or (norm.args[5] is True and is_by_columns(x))
    return is_split and (norm.meta["val"][1].dtype.itemsize > 2 or target.is_planned_gpu)


@rule(call(BATCH_NORM, ...), on=lambda target: target.is_planned_gpu)
def widen_moments(node: Node) -> Node:
    """Moments of 16 bits become fp32: a GPU computes them so, and the graph was traced on a CPU."""
    y, *moments = node.meta["val"][:3]
    node.meta["val"] = (y, *(x.float() if x.itemsize == 2 else x for x in moments), *node.meta["val"][3:])
    for user in node.users:
        user.meta["val"] = node.meta["val"][user.args[1]]
    return node


@rule(call(operator.getitem, call((BATCH_NORM, GROUP_NORM), "x", ..., name="norm"), 0), where=_keeps_its_moments)
def compute_from_moments(node: Node, norm: Node, x: Node) -> Any:
    results, after = {user.args[1]: user for user in norm.users}, norm.next
    mean, rstd = (results.get(place) or insert_call(after, operator.getitem, norm, place) for place in (1, 2))
    weight, bias = norm.args[1:3] if norm.target is BATCH_NORM else norm.args[2:4]
    formula = normalised if norm.target is BATCH_NORM else group_normalised
    # After the moments, wherever they are in the graph.
    return insert_formula(max(mean, rstd).next, formula, x, weight, bias, mean, rstd)
