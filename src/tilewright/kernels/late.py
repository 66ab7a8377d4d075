"""Recomputation for backward: its readers of a value read a second computation, and forward need not keep the first."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Any

from tilewright.graph import calls
from tilewright.graph.insert import insert_call

if TYPE_CHECKING:
    from torch.fx import Node


def readers(node: Node) -> Iterator[Node]:
    """The readers of `node`; of a view, the readers of that."""
    for user in node.users:
        if calls.is_view(user):
            yield from readers(user)
        else:
            yield user


def is_late(reader: Node, waiting: Container[Node]) -> bool:
    """Whether `reader` runs in backward: it is among the nodes that wait for gradients."""
    return reader.op != "output" and reader in waiting


def hand_late(old: Node, new: Node, waiting: Container[Node]) -> None:
    """Let the readers of `old` in backward read `new` instead, through views of their own."""
    for user in list(old.users):
        if is_late(user, waiting):
            user.replace_input_with(old, new)
        elif calls.is_view(user) and any(is_late(reader, waiting) for reader in readers(user)):
            target: Any = user.target
            hand_late(user, insert_call(user, target, new, *user.args[1:], **user.kwargs), waiting)
