"""Predicts which of PyTorch's fused attentions runs on a GPU that is absent.

A graph that was captured on a CPU calls the CPU's attention; all other calls are the same on a GPU.
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
"""cuDNN and FlashAttention-2 need head sizes that are multiples of this."""


def name_attention(graph: fx.Graph, target: Target) -> None:
    """Note at each attention the operator that runs on `target`, if that is an absent GPU."""
    if not target.is_planned_gpu:
        return
    major = int((target.profile.capability or "0").split(".")[0])
    for node in graph.nodes:
        if node.target in (ON_CPU.forward, ON_CPU.backward):
            peer = _peer(node, major)
            node.meta[calls.LAUNCHED] = peer.forward if node.target is ON_CPU.forward else peer.backward


def _peer(node: fx.Node, major: int) -> Peer:
    """PyTorch's choice, in the order of its `sdp_utils.cpp` (2.11): cuDNN, FlashAttention-2, memory-efficient."""
    named = calls.arguments(node)
    query = calls.tensor(named["query"])
    if query.dtype not in (torch.bfloat16, torch.float16) or query.shape[-1] % STEP:
        return EFFICIENT
    if major >= HOPPER and query.shape[-1] <= MOST_WIDE:
        return CUDNN
    return FLASH if named.get("attn_mask") is None else EFFICIENT
