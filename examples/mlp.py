"""(linear → GELU) × L: how time grows with width, depth, batch and steps.

Forward and backward take about 6·B·L·D² FLOPs a step: linear in depth, batch and steps, quadratic in
width, once the matrices are large enough to keep the machine busy.

    tilewright optimize examples/mlp.py:mlp
"""

from __future__ import annotations

import torch
from torch import nn

from tilewright.records.case import DTYPES, Case, InputSpec


class MLP(nn.Module):
    """`layers` times linear and GELU, [batch, dimension] → [batch, dimension]."""

    def __init__(self, dimension: int, layers: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(dimension, dimension) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = nn.functional.gelu(linear(x))
        return x


def case(*, dimension: int = 512, layers: int = 4, batch: int = 64, dtype: str = "fp32", name: str = "mlp") -> Case:
    def build() -> MLP:
        return MLP(dimension, layers).to(getattr(torch, DTYPES[dtype]))

    spec = InputSpec.parse(f"{dtype}[B={batch},D={dimension}]")
    return Case(name, build, [spec], dims={"L": layers})


def mlp(dimension: int = 512, layers: int = 4, batch: int = 64) -> Case:
    """One point of a study over width, depth and batch, named after where it lies."""
    name = f"mlp_D{dimension}_L{layers}_B{batch}"
    return case(dimension=dimension, layers=layers, batch=batch, name=name)


def train(dimension: int, layers: int, batch: int, steps: int) -> torch.Tensor:
    """The unit of the study: `steps` of Adam towards a fixed random target, [batch, dimension].

    Returns the loss before each step, [steps] fp32, on the default device. Nothing in the loop waits for
    that device: reading a loss as a number would.
    """
    model = MLP(dimension, layers)
    optimizer = torch.optim.Adam(model.parameters())
    x, target = torch.randn(2, batch, dimension)
    losses = torch.empty(steps)
    for step in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    return losses
