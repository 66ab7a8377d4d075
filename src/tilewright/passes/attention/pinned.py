"""Attention that the user gave to some of PyTorch's kernels stays with them.

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):        _sdpa_kernel([…FLASH_ATTENTION…])
        y = scaled_dot_product_attention(q, k, v)    →   y = …      # marked
                                                         _sdpa_kernel([… all of them …])

Dynamo records the context manager as two calls that set which kernels may run; the mark goes with a node's metadata
into the graph of ATen operators, where nothing else tells. Around the compiled call the switches themselves tell.
"""

from __future__ import annotations

import torch
from torch import fx

MARK = "tilewright_pinned"
ALL = frozenset({"FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"})
"""Names of PyTorch's own kernels, of which it chooses by itself."""


def mark_pinned(module: fx.GraphModule) -> None:
    """Mark what `module`, a torch-level graph from Dynamo, computes while not all kernels may run."""
    pinned = False
    for node in module.graph.nodes:
        if getattr(node.target, "__name__", "") == "_sdpa_kernel":
            pinned = not _names(node.args[0]) >= ALL
        elif pinned:
            # The one key of a node's metadata that AOTAutograd carries over as it is.
            node.meta["custom"] = {**node.meta.get("custom", {}), MARK: True}


def _names(backends: object) -> set[object]:
    """What `_backend_from_string` was given for each of the backends."""
    several = backends if isinstance(backends, (list, tuple)) else [backends]
    return {backend.args[0] for backend in several if isinstance(backend, fx.Node) and backend.args}


def is_pinned(node: fx.Node) -> bool:
    """Whether the user chose who computes this ATen operator, or has switched some of the kernels off."""
    switches = torch.backends.cuda
    enabled = (
        switches.flash_sdp_enabled(),
        switches.mem_efficient_sdp_enabled(),
        switches.cudnn_sdp_enabled(),
        switches.math_sdp_enabled(),
    )
    return MARK in node.meta.get("custom", {}) or not all(enabled)
