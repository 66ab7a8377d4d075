"""Predicts which of PyTorch's fused attentions runs on a GPU that is absent.

A graph that was captured on a CPU calls the CPU's attention; all other calls are the same on a GPU.
"""

from __future__ import annotations

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.hardware.target import Target
from tilewright.passes.attention.fused import CUDNN, EFFICIENT, FLASH, ON_CPU, Peer
from tilewright.passes.rule import Value, call, rule

HOPPER = 9
"""Major compute capability from which PyTorch prefers cuDNN."""
MOST_WIDE = 128
"""Largest head size of cuDNN's kernels, forward and backward."""
STEP = 8
"""cuDNN and FlashAttention-2 need head sizes that are multiples of this."""


def choice(target: Target, dtype: torch.dtype, width: int | torch.SymInt, *, has_mask: bool) -> Peer:
    """PyTorch's choice, in the order of its `sdp_utils.cpp` (2.11): cuDNN, FlashAttention-2, memory-efficient."""
    if dtype not in (torch.bfloat16, torch.float16) or width % STEP:
        return EFFICIENT
    if target.profile.generation >= HOPPER and width <= MOST_WIDE:
        return CUDNN
    return EFFICIENT if has_mask else FLASH


@rule(
    call((ON_CPU.forward, ON_CPU.backward), ..., query="query", attn_mask=Value("mask")),
    on=lambda target: target.is_planned_gpu,
)
def name_attention(node: fx.Node, query: fx.Node, mask: fx.Node | None, target: Target) -> fx.Node:
    value = calls.tensor(query)
    peer = choice(target, value.dtype, value.shape[-1], has_mask=mask is not None)
    node.meta[calls.LAUNCHED] = peer.forward if node.target is ON_CPU.forward else peer.backward
    return node
