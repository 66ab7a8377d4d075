"""On a GPU, each reader of a log-softmax of long rows computes it from two numbers per row, so that it is not written.

    y = _log_softmax(x, -1)     [*, C]   →   top = amax(x, -1); total = log(sum(exp(x - top), -1))       [*, 1]
    p = gather(y, -1, i)        [*, K]   →   p = (gather(x, -1, i) - top) - total
    others of y                          →   y = (x - top) - total, in the kernel of each reader

This is for log-probabilities of tokens (policies, preferences, distillation): 2048 rows of 32,000 in fp32 are 262 MB,
written in forward and saved for backward, although the logits, half that size, are read anyway. Cross entropy has its
own kernel. Runs before the cut into forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_formula, replace
from tilewright.graph.layouts import before_widening
from tilewright.graph.specialise import has_symbols
from tilewright.kernels.device import DTYPES
from tilewright.passes.rule import Value, call, rule, triton
from tilewright.passes.units import is_fusible, is_view, readers

aten: Any = torch.ops.aten
LEAST_COLUMNS, LEAST_ELEMENTS = 1024, 2**22
"""Smaller log-softmaxes stay in caches, where one kernel is faster than two."""


def _is_taken(node: fx.Node, logits: fx.Node, dim: int) -> bool:
    """Whether the rows are long, and all readers are gathers of few elements or can be fused."""
    x, y = calls.tensor(logits), calls.tensor(node)
    if has_symbols(y) or y.dtype not in DTYPES or dim not in (-1, y.dim() - 1):
        return False
    if not x.dim() or x.shape[-1] < LEAST_COLUMNS or x.numel() < LEAST_ELEMENTS or not x.is_contiguous():
        return False
    return all(_picks(reader, node) or _computes(reader) for reader in readers(node))


def _computes(reader: fx.Node) -> bool:
    return is_fusible(reader) is None and not calls.operator_name(reader.target).startswith("nll_loss")


def _picks(reader: fx.Node, softmax: fx.Node) -> bool:
    """Whether `reader` gathers few elements of each row of `softmax`."""
    if reader.target is not aten.gather.default or reader.args[0] is not softmax:
        return False
    y, picked = softmax.meta["val"], reader.meta["val"]
    along = reader.args[1] in (-1, y.dim() - 1)
    return along and y.shape[:-1] == picked.shape[:-1] and picked.shape[-1] * LEAST_COLUMNS <= y.shape[-1] * 64


@rule(call(aten._log_softmax.default, "logits", Value("dim"), ...), on=triton, where=_is_taken)
def compute_where_read(node: fx.Node, logits: fx.Node) -> fx.Node:
    dtype = node.meta["val"].dtype
    top, total = insert_formula(node, _numbers, logits)
    for reader in [user for user in node.users if _picks(user, node)]:
        replace(reader, insert_formula(reader, _pick, before_widening(logits), reader.args[2], top, total, dtype))
    # Insert one for each reader: the cut could save a shared one for backward.
    for reader in list(node.users):
        new = insert_formula(reader if not is_view(reader) else node, _shifted, logits, top, total, dtype)
        reader.replace_input_with(node, new)
    return node


def _numbers(x: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of each row, and log(sum(exp(x - maximum)))."""
    x = x.float()
    top = x.amax(-1, keepdim=True)
    return top, (x - top).exp().sum(-1, keepdim=True).log()


def _pick(x: Tensor, index: Tensor, top: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    return ((x.gather(-1, index).float() - top) - total).to(dtype)


def _shifted(x: Tensor, top: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    return ((x.float() - top) - total).to(dtype)
