"""Trains a byte-level GPT on the Python standard library of this machine, by eager, Inductor or tilewright.

    python -m examples.gpt.train --backend tilewright --steps 1000 --curve tilewright.jsonl
    torchrun --nproc-per-node 2 -m examples.gpt.train --backend tilewright
    python -m examples.gpt.compare eager.jsonl eager_again.jsonl inductor.jsonl tilewright.jsonl
    python -m examples.gpt.plot eager.jsonl eager_again.jsonl inductor.jsonl tilewright.jsonl --out gpt.png

AdamW, warm-up and cosine, clipping, accumulation of gradients, checkpoints. A run that is resumed from a checkpoint
has the losses of one that was never stopped: a batch follows from its step and rank alone. On a GPU the products are
in bf16 (autocast) over fp32 parameters. A line of the log is one step: loss in nats a byte, learning rate, norm of the
gradient, tokens/s, MFU against the measured matmul rate of the device (`tilewright doctor`), peak memory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sysconfig
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from examples.gpt.model import GPT, Shape, sample

BACKENDS = ("eager", "inductor", "tilewright")
HELD_OUT = 0.05
"""The share of the corpus, at its end, for validation."""


@dataclass
class Options:
    """One run. `batch` is that of a rank and a micro-step; `draws` changes what dropout draws and nothing else."""

    backend: str = "tilewright"
    steps: int = 1000
    batch: int = 16
    accumulate: int = 1
    rate: float = 6e-4
    warmup: int = 100
    decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    draws: int = 0
    validate_every: int = 250
    validation_batches: int = 8
    save_every: int = 500
    checkpoint: Path | None = None
    curve: Path | None = None
    data: Path | None = None
    shape: Shape = field(default_factory=Shape)


class Corpus:
    """The sources of the standard library as bytes; the last of them are held out."""

    def __init__(self, folder: Path | None = None) -> None:
        root = folder or Path(sysconfig.get_paths()["stdlib"])
        files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
        text = np.frombuffer(b"\n".join(path.read_bytes() for path in files), np.uint8)
        cut = int(len(text) * (1 - HELD_OUT))
        self.parts = {"train": text[:cut], "validation": text[cut:]}

    def batch(self, part: str, shape: tuple[int, int], seed: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Bytes [B, S] and those one further, int64, at places that follow from `seed`."""
        text, (count, length) = self.parts[part], shape
        starts = np.random.default_rng(seed).integers(0, len(text) - length, count)
        windows = np.stack([text[start : start + length + 1] for start in starts]).astype(np.int64)
        found = torch.from_numpy(windows)
        return found[:, :-1], found[:, 1:]


class Trainer:
    """A model with its optimizer, schedule and data; `steps()` trains and gives a row of the log for each step."""

    def __init__(self, options: Options, device: torch.device) -> None:
        self.options, self.device = options, device
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        torch.manual_seed(options.seed)
        self.corpus = Corpus(options.data)
        self.model = GPT(options.shape).to(device)
        run: nn.Module = self.model
        if self.ranks > 1:
            run = DistributedDataParallel(run, device_ids=[device.index] if device.type == "cuda" else None)
        self.parallel = run
        self.run: Any = run if options.backend == "eager" else torch.compile(run, backend=options.backend)
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        rest = [p for p in self.model.parameters() if p.dim() != 2]
        groups = [{"params": matrices, "weight_decay": options.decay}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95), fused=device.type == "cuda")
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._factor)
        self.done = 0
        # Ranks draw different dropout masks.
        torch.manual_seed(options.seed + 1 + self.rank + self.ranks * options.draws)

    def _factor(self, step: int) -> float:
        """The factor of the learning rate: linear warm-up, then half a cosine down to a tenth."""
        warmup, steps = self.options.warmup, self.options.steps
        if step < warmup:
            return (step + 1) / warmup
        through = (step - warmup) / max(steps - warmup, 1)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(through, 1.0)))

    def steps(self) -> Iterator[dict[str, float]]:
        while self.done < self.options.steps:
            began, rate = time.perf_counter(), float(self.schedule.get_last_lr()[0])
            loss, norm = self._step()
            elapsed = time.perf_counter() - began
            options = self.options
            tokens = options.batch * options.accumulate * options.shape.sequence * self.ranks
            row: dict[str, float] = {
                "step": self.done, "loss": loss, "rate": rate, "norm": norm,
                "tokens_per_s": tokens / elapsed, "flops_per_s": tokens * self.model.flops_per_token() / elapsed,
                "peak_MiB": self._peak_bytes() / 2**20,
            }  # fmt: skip
            self.done += 1
            if self.done % options.validate_every == 0 or self.done == options.steps:
                row["validation_loss"] = self.validation_loss()
            if options.checkpoint and (self.done % options.save_every == 0 or self.done == options.steps):
                self.save(options.checkpoint)
            yield row

    def _step(self) -> tuple[float, float]:
        """One optimizer step: the mean loss of its micro-steps on this rank, and the norm of the gradient."""
        options, total = self.options, 0.0
        for micro in range(options.accumulate):
            x, y = self._batch("train", (options.seed, self.done, micro, self.rank))
            last = micro == options.accumulate - 1
            waits = isinstance(self.parallel, DistributedDataParallel) and not last
            with self.parallel.no_sync() if waits else nullcontext():  # type: ignore[operator]
                with self._precision():
                    loss = self.run(x, y) / options.accumulate
                loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), options.clip)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm.item()

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean loss over the same held-out batches at each call, by the model as PyTorch runs it."""
        self.model.eval()
        losses = []
        for number in range(self.options.validation_batches):
            x, y = self._batch("validation", (number,))
            with self._precision():
                losses.append(self.model(x, y).item())
        self.model.train()
        return sum(losses) / len(losses)

    def _batch(self, part: str, seed: tuple[int, ...]) -> list[torch.Tensor]:
        shape = self.options.batch, self.options.shape.sequence
        return [x.to(self.device, non_blocking=True) for x in self.corpus.batch(part, shape, seed)]

    def _precision(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def _peak_bytes(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def save(self, path: Path) -> None:
        """Write a checkpoint at once: a run that is stopped meanwhile leaves the one before."""
        state = {"step": self.done, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                 "schedule": self.schedule.state_dict(), "generators": self._generators()}  # fmt: skip
        found: list[Any] = [None] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(found, state["generators"])
            state["generators"] = {rank: each[rank] for rank, each in enumerate(found)}
        if self.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, partial := path.with_suffix(".partial"))
            os.replace(partial, path)

    def resume(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.done = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        cpu, gpu = state["generators"][self.rank]
        torch.set_rng_state(cpu.cpu())
        if gpu is not None:
            torch.cuda.set_rng_state(gpu.cpu(), self.device)

    def _generators(self) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
        gpu = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return {self.rank: (torch.get_rng_state(), gpu)}


def train(options: Options, device: torch.device, *, quiet: bool = False) -> Trainer:
    """Train to the last step, from the checkpoint if there is one; the first rank writes the log and the bar."""
    trainer = Trainer(options, device)
    if options.checkpoint and options.checkpoint.exists():
        trainer.resume(options.checkpoint)
    log = options.curve.open("a") if options.curve and trainer.rank == 0 else None
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with log or nullcontext(), Progress(*columns, disable=quiet or trainer.rank > 0) as bar:
        task = bar.add_task(options.backend, total=options.steps, completed=trainer.done)
        for row in trainer.steps():
            if log:
                _write(log, options, device, row)
            told = f"{options.backend}  loss {row['loss']:.3f}  {row['tokens_per_s'] / 1e3:.0f}k tokens/s"
            bar.update(task, advance=1, description=told)
    return trainer


def _write(log: IO[str], options: Options, device: torch.device, row: dict[str, float]) -> None:
    from tilewright.hardware.profiles import kept_profile

    dtype = "bfloat16" if device.type == "cuda" else "float32"
    peak = kept_profile(device.type).matmul_TFLOPs[dtype] * 1e12
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    row = row | {"mfu": row["flops_per_s"] / (peak * ranks)}
    log.write(json.dumps({"backend": options.backend, "ranks": ranks} | row) + "\n")
    log.flush()


def _options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, default="tilewright")
    defaults = asdict(Options())
    for name, kind in (("checkpoint", Path), ("curve", Path), ("data", Path)):
        parser.add_argument(f"--{name}", type=kind)
    numbers = [name for name, value in defaults.items() if isinstance(value, (int, float))]
    for name in numbers:
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(defaults[name]), default=defaults[name])
    for name, value in asdict(Shape()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    given = vars(parser.parse_args())
    return Options(shape=Shape(**{name: given.pop(name) for name in asdict(Shape())}), **given)


def main() -> None:
    options = _options()
    if options.backend == "tilewright":
        import tilewright.backend as own

        if "tilewright" not in torch._dynamo.list_backends():
            torch._dynamo.register_backend(own.backend, name="tilewright")
    on_gpu = torch.cuda.is_available()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    trainer = train(options, device)
    if trainer.rank == 0:
        print(sample(trainer.model, b"def ", 300).decode("ascii", errors="backslashreplace"))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
