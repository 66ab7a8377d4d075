"""Why Dynamo ended a graph, in the user's words."""

from __future__ import annotations

import re

from torch import fx

from tilewright.graph.source import place_text
from tilewright.records.program import Fallback

SHORT = 40
"""Longer contexts of Dynamo's messages are omitted."""


def graph_break(module: fx.GraphModule) -> Fallback | None:
    """The graph break that ended this graph, if there was one.

    Dynamo marks the cuts between the buckets of a DDP module as breaks, too; no operator runs there.
    """
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or any(f.name == "DDPOptimizer" for f in reason.user_stack):
        return None
    where = "an unknown place"
    if reason.user_stack:
        frame = reason.user_stack[-1]
        where = place_text(frame.filename, frame.lineno, frame.line or "")
    return Fallback("the call that breaks the graph", where, in_words(reason.reason))


def in_words(message: str) -> str:
    """The first line of Dynamo's message with its context, without names of Dynamo's own.

    >>> in_words("generic_jump TensorVariable()")
    "which branch is taken depends on a tensor's value"
    >>> in_words("Attempted to wrap RNN, GRU, or LSTM\\n  Developer debug context: LSTM(8, 8)")
    'Attempted to wrap RNN, GRU, or LSTM: LSTM(8, 8)'
    """
    if jump := re.match(r"generic_jump (\w+)", message):
        value = "a tensor's value" if jump[1] == "TensorVariable" else "a value that is known only when it runs"
        return f"which branch is taken depends on {value}"
    if message.startswith("step_unsupported"):
        # Dynamo restarts the analysis here and does not keep why.
        return "Dynamo does not trace this statement; TORCH_LOGS=graph_breaks says why"
    lines = [line.strip() for line in message.strip().splitlines()] or ["no reason is given"]
    context = next((line.partition(":")[2].strip() for line in lines if line.startswith("Developer debug context")), "")
    return f"{lines[0]}: {context}" if 0 < len(context) <= SHORT else lines[0]
