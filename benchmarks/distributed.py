"""Training on several ranks: DDP, FSDP2 and tensor parallel per block, by eager, Inductor and tilewright.

    python -m benchmarks.distributed --device cuda --ranks 2 --out benchmarks/results/h200x2/distributed.jsonl
    python -m benchmarks.distributed --ranks 2 --shape 2,2,64,128,4          # on a CPU, over gloo

Four pre-norm Transformer blocks of fp32 parameters that compute in bf16 on a GPU, AdamW; DDP again with two halves of
the batch and one reduction of gradients (`no_sync`). A row's time is the wall time of a step of the first rank, the
ranks in lock-step and the entrants interleaved; `error` is the largest relative
difference of a loss from eager's over 20 steps, `eager_error` that of a second run of eager's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.step_stopwatch import StepStopwatch
from tilewright.hardware.ceilings import device_name
from tilewright.hardware.detect import detect
from tilewright.measure.racing.results import append_results, environment, measurement, sources_of_programs
from tilewright.measure.timing.benchmark import Timing, timing_of
from tilewright.measure.timing.stopwatch import CpuStopwatch
from tilewright.records.measurement import Measurement

ENTRANTS = ("eager", "inductor", "tilewright")
AGAIN = "eager again"
STEPS = 20


@dataclass(frozen=True)
class Shape:
    """Layers, batch of a rank, sequence, width, heads."""

    L: int = 4
    B: int = 8
    S: int = 1024
    D: int = 1024
    H: int = 16

    def __str__(self) -> str:
        return f"L{self.L} B{self.B} S{self.S} D{self.D} H{self.H}"


class Block(nn.Module):
    """Causal attention and a feed-forward of width 4·D; [B, S, D] → [B, S, D]. A rank may hold some of the heads."""

    def __init__(self, D: int, H: int) -> None:
        super().__init__()
        self.head = D // H
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.query, self.key, self.value, self.out = (nn.Linear(D, D) for _ in range(4))
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        q, k, v = (
            project(normed).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shape.D, shape.H) for _ in range(shape.L))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


TENSOR_PARALLEL = {
    **{name: ColwiseParallel for name in ("query", "key", "value", "up")},
    **{name: RowwiseParallel for name in ("out", "down")},
}


class Trainer:
    """One model under one way of distributing, run by one entrant; a call is a step and gives its loss."""

    def __init__(self, way: str, entrant: str, shape: Shape, device: torch.device) -> None:
        torch.manual_seed(0)
        self.way, self.device = way, device
        self.halves = 2 if way == "ddp no_sync" else 1
        model: nn.Module = Model(shape).to(device)
        self.model = model
        self.run: Callable[[torch.Tensor], torch.Tensor] = model
        if way.startswith("ddp"):
            self.model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
            self.run = compiled(self.model, entrant)
        else:
            self._per_block(model, entrant, shape)
        # One multi-tensor kernel takes no mixture of DTensors and tensors.
        several = False if way == "tensor parallel" else None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=several)
        # Ranks that share the tensors of a block share its batch; else each has its own.
        generator = torch.Generator().manual_seed(0 if way == "tensor parallel" else dist.get_rank())
        x, self.y = torch.randn(2, shape.B, shape.S, shape.D, generator=generator).to(device)
        self.x = x

    def _per_block(self, model: nn.Module, entrant: str, shape: Shape) -> None:
        blocks: Any = model.blocks
        policy = MixedPrecisionPolicy(torch.bfloat16) if self.device.type == "cuda" else MixedPrecisionPolicy()
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for place in range(len(blocks)):
            if self.way == "tensor parallel":
                parallelize_module(blocks[place], mesh, {name: style() for name, style in TENSOR_PARALLEL.items()})
            blocks[place] = compiled(blocks[place], entrant)
            if self.way == "fsdp2":
                fully_shard(blocks[place], mp_policy=policy)
        if self.way == "fsdp2":
            fully_shard(model, mp_policy=policy)

    def __call__(self) -> torch.Tensor:
        total = torch.zeros((), device=self.device)
        for half, (x, y) in enumerate(zip(self.x.chunk(self.halves), self.y.chunk(self.halves), strict=True)):
            with self._without_reduction(is_last=half == self.halves - 1), self._precision():
                loss = (self.run(x).float() - y).square().mean() / self.halves
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def _without_reduction(self, *, is_last: bool) -> AbstractContextManager[None]:
        held: AbstractContextManager[None] = nullcontext() if is_last else self.model.no_sync()  # type: ignore[operator]
        return held

    def _precision(self) -> AbstractContextManager[object]:
        """FSDP2 casts what it gathers; elsewhere autocast does."""
        return torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda" and self.way != "fsdp2")


def compiled(module: nn.Module, entrant: str) -> Any:
    if entrant.startswith("eager"):
        return module
    if entrant == "inductor":
        return torch.compile(module)
    from tilewright.backend import backend

    return torch.compile(module, backend=backend)


WAYS = ("ddp", "fsdp2", "tensor parallel", "ddp no_sync")


def race(way: str, device: torch.device, given: argparse.Namespace) -> Iterator[Measurement]:
    """The rows of one way of distributing. Every rank takes the same steps in the same order."""
    torch._dynamo.reset()
    trainers = {name: Trainer(way, name, given.shape, device) for name in (*given.entrants, AGAIN)}
    losses, first_us = {}, {}
    for name, trainer in trainers.items():
        began = time.perf_counter()
        first = trainer().item()
        first_us[name] = (time.perf_counter() - began) * 1e6
        losses[name] = [first, *(trainer().item() for _ in range(STEPS - 1))]
    timings, peaks = timed({name: trainers[name] for name in given.entrants}, device, given.repeats)
    where = environment(f"{dist.get_world_size()} × {device_name(detect(), device.type)}")
    for name in given.entrants:
        yield measurement(
            timings[name],
            where,
            suite="distributed",
            case=f"{way} {given.shape} {'bf16' if device.type == 'cuda' else 'fp32'}",
            impl=name,
            direction="step",
            peak_bytes=peaks[name],
            first_call_us=first_us[name],
            made_from=sources_of_programs(name),
            error=largest_difference(losses[name], losses["eager"]),
            eager_error=largest_difference(losses[AGAIN], losses["eager"]),
            note=f"losses {losses[name][0]:.5f} to {losses[name][-1]:.5f}",
        )


def timed(
    trainers: dict[str, Trainer], device: torch.device, repeats: int
) -> tuple[dict[str, Timing], dict[str, int | None]]:
    """Step times, interleaved, and the peak of a step beyond what all trainers hold, in bytes; None on a CPU."""
    on_gpu = device.type == "cuda"
    watch = StepStopwatch() if on_gpu else CpuStopwatch()
    names = list(trainers)
    laps: dict[str, list[Any]] = {name: [] for name in names}
    peaks: dict[str, int | None] = dict.fromkeys(names)
    for number in range(repeats):
        for offset in range(len(names)):
            name = names[(number + offset) % len(names)]
            dist.barrier()
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            laps[name].append(watch.time(trainers[name]))
            if on_gpu:
                peaks[name] = max(peaks[name] or 0, torch.cuda.max_memory_allocated() - before)
    return {name: timing_of(found, 0.01) for name, found in laps.items()}, peaks


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def work(rank: int, given: argparse.Namespace, rendezvous: str) -> None:
    """One rank; the first prints and writes the rows."""
    on_gpu = given.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", rank=rank, world_size=given.ranks, init_method=f"file://{rendezvous}"
    )
    for way in given.ways:
        rows = list(race(way, device, given))
        if rank == 0:
            for row in rows:
                print(line(row, rows), flush=True)
            if given.out:
                append_results(given.out, rows)
    dist.barrier()
    dist.destroy_process_group()


def line(row: Measurement, rows: Sequence[Measurement]) -> str:
    eager = next(other for other in rows if other.impl == "eager")
    peak = "" if row.peak_bytes is None else f"  peak {row.peak_bytes / 2**20:7.0f} MiB"
    first = f"  first {(row.first_call_us or 0) / 1e6:5.1f} s"
    return (
        f"{row.case:45} {row.impl:11} {row.median_us / 1e3:9.3f} ms  {eager.median_us / row.median_us:5.2f} × eager"
        f"  loss error {row.error:.1e} (eager {row.eager_error:.1e}){peak}{first}"
    )


def _shape(text: str) -> Shape:
    return Shape(*map(int, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--entrants", type=lambda text: text.split(","), default=list(ENTRANTS))
    parser.add_argument("--shape", type=_shape, default=Shape(), help="layers,batch,sequence,width,heads")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, help="result file to which rows are added")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, args=(given, str(Path(folder) / "rendezvous")), nprocs=given.ranks)


if __name__ == "__main__":
    main()
