"""What a norm gives is computed again from its moments: backward gets neither it nor what only kernels read."""

import torch
from torch import Tensor, nn

from tests.contract import keeps_contract
from tilewright.backend import Recording

CHANNELS, PLACES = 24, 13 * 11


class Gated(nn.Module):
    """Convolution, norm, SiLU and a gate of each channel, twice over the channels in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Conv2d(CHANNELS, 8, 1)
        self.norm = nn.BatchNorm2d(CHANNELS)
        self.gate = nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.silu(self.norm(self.first(x)))
        found: Tensor = self.last(y * self.gate(y.mean((2, 3), keepdim=True)).sigmoid())
        return found


def large(record: Recording) -> list[str]:
    """What backward gets of all channels and places, without the model's input."""
    graph = record.graphs[1].plan.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return [node.name for node in inputs if node.meta["val"].numel() == 8 * CHANNELS * PLACES]


def test_backward_gets_operands_of_convolutions_and_of_norms() -> None:
    model = Gated().to(memory_format=torch.channels_last)
    x = torch.randn(8, CHANNELS, 13, 11).contiguous(memory_format=torch.channels_last)
    record = keeps_contract(model, [x])
    assert record.fallbacks == []
    # The input, what the first convolution gives and what the last one takes: not the norm's result, nor SiLU's.
    assert len(large(record)) == 3
