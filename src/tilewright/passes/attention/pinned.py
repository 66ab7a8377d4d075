"""Leaves attention for which the user chose PyTorch's kernels to those kernels.

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):        _sdpa_kernel([…FLASH_ATTENTION…])
        y = scaled_dot_product_attention(q, k, v)    →   y = …      # marked
                                                         _sdpa_kernel([… all of them …])

Dynamo records the context manager as two calls that set which kernels may run. A mark in a node's metadata carries this
to the graph of ATen operators. If the context manager is around the compiled call, PyTorch's switches are set instead.
"""

from __future__ import annotations

import torch
from torch import fx

from tilewright.hardware.target import Target

MARK = "tilewright_pinned"
ALL = frozenset({"FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"})
"""The kernels among which PyTorch chooses by default."""


def mark_pinned(graph: fx.Graph, target: Target) -> None:
    """Mark the nodes of `module`, a torch-level graph from Dynamo, that run while some kernels are disabled."""
    pinned = False
    for node in graph.nodes:
        if getattr(node.target, "__name__", "") == "_sdpa_kernel":
            pinned = not _names(node.args[0]) >= ALL
        elif pinned:
            # AOTAutograd copies only this key of a node's metadata.
            node.meta["custom"] = {**node.meta.get("custom", {}), MARK: True}


def _names(backends: object) -> set[object]:
    """The names of these backends: arguments of `_backend_from_string` calls."""
    several = backends if isinstance(backends, (list, tuple)) else [backends]
    return {backend.args[0] for backend in several if isinstance(backend, fx.Node) and backend.args}


def is_pinned(node: fx.Node) -> bool:
    """Whether the user chose the kernels of this ATen operator, or has disabled some of PyTorch's kernels."""
    switches = torch.backends.cuda
    enabled = (
        switches.flash_sdp_enabled(),
        switches.mem_efficient_sdp_enabled(),
        switches.cudnn_sdp_enabled(),
        switches.math_sdp_enabled(),
    )
    return MARK in node.meta.get("custom", {}) or not all(enabled)
