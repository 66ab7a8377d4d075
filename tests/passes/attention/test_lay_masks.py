"""A bias with the heads last is laid row by row by the kernel that makes it, once for all calls that read it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.backend.compiling import compiled
from tilewright.backend import recording
from tilewright.passes.attention.fused import ON_CPU


def layers(x: Tensor, table: Tensor) -> Tensor:
    bias = (table * 2).permute(2, 0, 1)[None]
    for _ in range(2):
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=bias)
    return x


def test_the_bias_of_two_layers_is_written_once_and_contiguous() -> None:
    x, table = torch.randn(2, 4, 24, 16), torch.randn(24, 24, 4)
    with torch.no_grad(), recording() as record:
        found = compiled(layers)(x, table)
    torch.testing.assert_close(found, layers(x, table))
    (graph,) = record.graphs
    masks = {node.kwargs["attn_mask"] for node in graph.plan.graph.nodes if node.target is ON_CPU.forward}
    (mask,) = masks
    assert mask.meta["val"].is_contiguous()
    assert len(graph.plan.fusion.regions) == 1 and mask in graph.plan.fusion.regions[0].lowered.outputs
