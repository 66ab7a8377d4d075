"""The plan that is made without the device names the kernels that then run on it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.model_launches import differences, explained, launch_rows
from benchmarks.model_zoo import Workload
from tilewright import backend
from tilewright.hardware.target import target_of

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    """Attention and a feed-forward layer with norms: library calls, generated kernels and tilewright's own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


@pytest.mark.parametrize("trains", [False, True])
def test_a_plan_without_the_device_names_what_runs_on_it(trains: bool) -> None:
    model = Block(768, 12).bfloat16()
    x = torch.randn(8, 512, 768, dtype=torch.bfloat16)
    profile = target_of(torch.device("cuda")).profile
    planned = explained(Workload(copy.deepcopy(model), {"x": x}, "B8"), trains, profile)
    assert isinstance(planned, list)
    model, there = model.cuda().train(trains), x.cuda()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend.backend)

    def step() -> None:
        with torch.set_grad_enabled(trains):
            y = compiled(there)
        if trains:
            y.float().sum().backward()

    with backend.recording() as record:
        step()
    rows = launch_rows("block", "train" if trains else "infer", record, step, "cuda", profile)
    assert len(rows) > 6 and any(row.generated for row in rows) and any("tilewright" in row.what for row in rows)
    assert differences(planned, rows) == []
