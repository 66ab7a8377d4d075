"""Computes the result of a batch or group norm from its moments, so that backward can recompute it.

    y, mean, rstd = batch_norm(x, w, b)       →    _, mean, rstd = batch_norm(x, w, b)
    g = silu_backward(dy, y)                       y = (x - mean) · (rstd · w) + b
                                                   g = silu_backward(dy, y)

The norm's gradient reads x, mean and rstd anyway, and backward recomputes y from these without more memory traffic. An
EfficientNet block then saves one tensor less for each norm, of four.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from tilewright.graph.insert import insert_call, insert_formula, replace
from tilewright.hardware.target import Target
from tilewright.operators.channels import GROUP_NORM
from tilewright.passes.norm.group import normalised as group_normalised
from tilewright.passes.norm.split import is_by_columns, normalised

aten = torch.ops.aten
BATCH_NORM = aten._native_batch_norm_legit_functional.default


def compute_from_moments(graph: fx.Graph, target: Target) -> None:
    """Rewrite a joint graph of ATen operators, in place."""
    for node in list(graph.nodes):
        if node.target is BATCH_NORM and target.is_planned_gpu:
            _widen_moments(node)
        batch_norm = node.target is BATCH_NORM and node.args[5] is True and is_by_columns(node.args[0])
        if batch_norm or str(node.target) == GROUP_NORM:
            _replace(node, target)


def _widen_moments(norm: fx.Node) -> None:
    """Moments of 16 bits become fp32: a GPU computes them so, and the graph was traced on a CPU."""
    y, *moments = norm.meta["val"][:3]
    norm.meta["val"] = (y, *(x.float() if x.itemsize == 2 else x for x in moments), *norm.meta["val"][3:])
    for user in norm.users:
        user.meta["val"] = norm.meta["val"][user.args[1]]


def _replace(norm: fx.Node, target: Target) -> None:
    results = {user.args[1]: user for user in norm.users}
    if 0 not in results or not _keeps_its_moments(norm, target):
        return
    y, after = results[0], norm.next
    mean, rstd = (results.get(place) or insert_call(after, operator.getitem, norm, place) for place in (1, 2))
    # After the moments, wherever they are in the graph.
    order = {node: place for place, node in enumerate(norm.graph.nodes)}
    after = max((mean, rstd), key=order.__getitem__).next
    x = norm.args[0]
    weight, bias = norm.args[1:3] if norm.target is BATCH_NORM else norm.args[2:4]
    formula = normalised if norm.target is BATCH_NORM else group_normalised
    replace(y, insert_formula(after, formula, x, weight, bias, mean, rstd))


def _keeps_its_moments(norm: fx.Node, target: Target) -> bool:
    """Whether the moments are wider than 16 bits, as they always are on a GPU."""
    return bool(norm.meta["val"][1].dtype.itemsize > 2 or target.is_planned_gpu)
