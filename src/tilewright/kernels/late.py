"""Recomputation for backward: backward's readers of a value read a second copy, so that forward need not save it."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

from tilewright.graph import calls
from tilewright.graph.insert import insert_call

if TYPE_CHECKING:
    from torch.fx import Node


def is_late(reader: Node, waiting: Container[Node]) -> bool:
    """Whether `reader` runs in backward: it is among the nodes that wait for gradients."""
    return reader.op != "output" and reader in waiting


def hand_late(old: Node, new: Node, waiting: Container[Node]) -> None:
    """Let the readers of `old` in backward read `new` instead, through new views where they read views."""
    for user in list(old.users):
        if is_late(user, waiting):
            user.replace_input_with(old, new)
        elif calls.is_view(user) and any(is_late(reader, waiting) for reader in calls.readers(user)):
            target: Any = user.target
            hand_late(user, insert_call(user, target, new, *user.args[1:], **user.kwargs), waiting)
