"""Offers of the hand-written kernels of `kernels/`: one line for each.

    y = _log_softmax(x, 1); loss = nll_loss_forward(y, t, …)     →   loss = cross_entropy(x, t, …)

On the joint graph, since the choice decides what is saved for backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from tilewright.choose.chooser import chosen
from tilewright.graph import calls
from tilewright.graph.undefined import gradients
from tilewright.hardware.target import Target
from tilewright.kernels.convolution.offer import CANDIDATE as CONVOLUTION
from tilewright.kernels.cross_entropy.offer import CANDIDATE as CROSS_ENTROPY
from tilewright.kernels.linear.offer import CANDIDATE as LINEAR_GELU
from tilewright.kernels.norm.offer import CANDIDATE as NORM
from tilewright.kernels.offer import Offer
from tilewright.kernels.product.offer import CANDIDATE as PRODUCT
from tilewright.kernels.softmax.offer import CANDIDATE as SOFTMAX
from tilewright.passes.simplify import drop_round_trips, drop_unread

CANDIDATES = (CROSS_ENTROPY, NORM, SOFTMAX, LINEAR_GELU, PRODUCT, CONVOLUTION)


def offers(graph: fx.Graph, target: Target) -> Iterator[Sequence[Offer]]:
    """The offers at each match, in a joint or inference graph of ATen operators."""
    waiting, any_taken = gradients(graph), False
    for candidate in CANDIDATES:
        for node in [n for n in graph.nodes if str(n.target) in candidate.roots and _sizes_are_known(n)]:
            size = len(graph.nodes)
            if found := candidate.offers(node, target, waiting):
                yield found
            if len(graph.nodes) != size:
                # One was taken, which inserts calls.
                drop_unread(graph)
                waiting, any_taken = gradients(graph), True
    if any_taken:
        drop_round_trips(graph)


def _sizes_are_known(node: fx.Node) -> bool:
    """Whether no size of the operands and results depends on data; sizes that change between calls have a hint."""
    tensors = [value for one in (node, *node.all_input_nodes) for value in calls.results(one)]
    return all(calls.is_known(size) for value in tensors for size in value.shape)


choose_candidates = chosen("candidates", offers)
