"""The passes in the order they run: what every graph goes through, compiled or only explained."""

from __future__ import annotations

from torch import fx

from tilewright.passes.attention import recognise_attention
from tilewright.passes.attention_shift import settle_shifts
from tilewright.passes.copies import drop_copies
from tilewright.passes.dropout import split_dropout
from tilewright.passes.simplify import simplify
from tilewright.records.program import Decision


def optimise_module(module: fx.GraphModule) -> list[Decision]:
    """Before autograd, on the torch-level graph: attention, while it still is one."""
    decisions = recognise_attention(module)
    settle_shifts(module)
    return decisions


def optimise_joint(graph: fx.Graph) -> list[Decision]:
    """Before the cut into forward and backward: copies, common subexpressions, dead code, dropout."""
    drop_copies(graph)
    simplify(graph)
    split_dropout(graph)
    return []
