"""Run by test_distributed.py in a process for each rank: training under a way of distributing, compiled and eager.

python -m tests.backend.distributing RANK RANKS RENDEZVOUS cpu|cuda SCENARIO…
"""

import copy
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.backend.compiling import compiled, kernels
from tilewright.backend import recording

WIDTH = 160
STEPS = 4
Losses = list[float]
DEVICE = torch.device("cpu")
"""This rank's device; `main` sets it."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Encoder(nn.Module):
    """Two layers of 1.2 MB each; Dynamo cuts the graph of a DDP module at every bucket of 1 MB, the least.

    A module of PyTorch's own directly in DDP would not be traced: Dynamo skips frames of `torch.nn`.
    """

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


def batches(rank: int) -> Iterable[torch.Tensor]:
    """This rank's share of each step's batch."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 8, WIDTH, generator=generator).to(DEVICE) for _ in range(STEPS)]


def train(run: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, rank: int, accumulate: int = 1) -> Losses:
    """The losses of `STEPS` batches; every `accumulate` of them the gradients are reduced and a step is made."""
    # Over lists, as is usual on a GPU, it does not take tensors and DTensors together.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses = []
    for number, x in enumerate(batches(rank), 1):
        reduces = number % accumulate == 0
        with nullcontext() if reduces else model.no_sync():  # type: ignore[operator]
            loss = run(x).square().mean()
            loss.backward()
        if reduces:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def agree(ours: Losses, eager: Losses) -> None:
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(eager), rtol=1e-4, atol=1e-5)
    assert ours[-1] != ours[0]


def ddp(rank: int) -> None:
    """Every other step reduces no gradients."""
    model = Encoder().to(DEVICE)
    wrapped = [DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=1) for _ in range(2)]
    eager = train(wrapped[0], wrapped[0], rank, accumulate=2)
    with recording() as record:
        ours = train(compiled(wrapped[1]), wrapped[1], rank, accumulate=2)
    agree(ours, eager)
    assert len(record.graphs) > 2 and kernels(record), len(record.graphs)


def fsdp(rank: int) -> None:
    def sharded(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*[Layer() for _ in range(2)]).to(DEVICE)
        for place in range(len(model)):
            fully_shard(model[place])
            model[place] = wrap(model[place])
        return fully_shard(model)

    first, second = sharded(lambda layer: layer), sharded(compiled)
    eager = train(first, first, rank)
    with recording() as record:
        ours = train(second, second, rank)
    agree(ours, eager)
    assert kernels(record)


def tensor_parallel(rank: int) -> None:
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))

    def parallel() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*[Layer() for _ in range(2)]).to(DEVICE)
        for layer in model:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model

    first, second = parallel(), parallel()
    eager = train(first, first, 0)
    with recording() as record:
        for place in range(len(second)):
            second[place] = compiled(second[place])
        ours = train(second, second, 0)
    agree(ours, eager)
    assert kernels(record)


def column_parallel_result(rank: int) -> None:
    """A layer whose result is gathered: the graph's saved values are not tensors alone."""
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU()).to(DEVICE)
    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    models = [parallelize_module(copy.deepcopy(model), mesh, {"0": ColwiseParallel(output_layouts=Replicate())})]
    models.append(copy.deepcopy(models[0]))
    x = torch.randn(8, 16).to(DEVICE)
    with recording() as record:
        compiled(models[1])(x).pow(2).mean().backward()
    models[0](x).pow(2).mean().backward()
    for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert isinstance(mine.grad, DTensor) and isinstance(theirs.grad, DTensor)
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad.full_tensor(), rtol=1e-4, atol=1e-5)
    assert kernels(record)


def main(rank: int, ranks: int, rendezvous: str, device: str, scenarios: list[str]) -> None:
    global DEVICE
    torch.set_num_threads(1)
    if device == "cuda":
        DEVICE = torch.device("cuda", rank)
        torch.cuda.set_device(DEVICE)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=ranks, init_method=f"file://{rendezvous}")
    for scenario in scenarios:
        torch.manual_seed(0)
        torch._dynamo.reset()
        globals()[scenario](rank)
        print(f"{scenario} done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
