"""The fused attention of PyTorch that would run on a GPU that is not here.

A graph that was captured on a CPU calls the CPU's; no other call differs.
"""

from __future__ import annotations

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.hardware.target import Target
from tilewright.passes.attention.fused import CUDNN, EFFICIENT, FLASH, ON_CPU, Peer

HOPPER = 9
"""Major compute capability from which PyTorch prefers cuDNN."""
MOST_WIDE = 128
"""Largest head size of cuDNN's kernels, forward and backward."""
STEP = 8
"""Elements that divide the rows of cuDNN's and FlashAttention's operands."""


def name_attention(graph: fx.Graph, target: Target) -> None:
    """Note at each call what it is on `target`; nothing where the graph was captured there."""
    if not target.is_planned_gpu:
        return
    major = int((target.profile.capability or "0").split(".")[0])
    for node in graph.nodes:
        if node.target in (ON_CPU.forward, ON_CPU.backward):
            peer = _peer(node, major)
            node.meta[calls.LAUNCHED] = peer.forward if node.target is ON_CPU.forward else peer.backward


def _peer(node: fx.Node, major: int) -> Peer:
    """By the order of PyTorch's `sdp_utils.cpp` (2.11): cuDNN, FlashAttention, the memory-efficient kernel."""
    named = calls.arguments(node)
    operand = named["query"]
    query = calls.output(operand) if isinstance(operand, fx.Node) else None
    assert query is not None
    if query.dtype not in (torch.bfloat16, torch.float16) or query.shape[-1] % STEP:
        return EFFICIENT
    if major >= HOPPER and query.shape[-1] <= MOST_WIDE:
        return CUDNN
    return FLASH if named.get("attn_mask") is None else EFFICIENT
