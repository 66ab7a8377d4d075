"""Programs with a change each, for `benchmarks.whatif`: the sizes are those at which a step takes milliseconds."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import tilewright.functional

Step = Callable[[], object]
_COPIES = "gone:*nchwToNhwc*,*nhwcToNchw*"


@dataclass(frozen=True)
class Change:
    """A program before and after a change, as functions that make its step, and how `whatif` calls the change."""

    name: str
    asked: str
    before: Callable[[], Step]
    after: Callable[[], Step]


class Samples(Dataset[Any]):
    """Each takes so many milliseconds of sleep."""

    def __init__(self, width: int, ms: float) -> None:
        self.width, self.ms = width, ms

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.ms / 1e3)
        return torch.randn(self.width), at % 10


class Attention(nn.Module):
    """A layer of a decoder, without its norms' biases and dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class OwnNorm(nn.LayerNorm):
    """By tilewright's kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tilewright.functional.layer_norm(x, self.weight, self.bias, self.eps)


class Programs:
    """Programs of one device: perceptrons, wide and small, a decoder, and convolutions."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.on_gpu = device == "cuda"
        self.wide, self.batch = (4096, 2048) if self.on_gpu else (512, 256)

    def perceptron(self, width: int, layers: int, dropout: float = 0.0) -> nn.Module:
        parts = [
            part
            for _ in range(layers)
            for part in (nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout))[: 2 + (dropout > 0)]
        ]
        return nn.Sequential(*parts, nn.Linear(width, 10)).to(self.device)

    def trained(
        self, model: nn.Module, x: torch.Tensor, around: Step | None = None, **options: Any
    ) -> Callable[[], torch.Tensor]:
        """A training step of `model` with AdamW; `around` is called once in it."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **({"fused": True} | options))
        y = torch.randint(0, 10, (len(x),), device=self.device)

        def step() -> torch.Tensor:
            loss = functional.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if around is not None:
                around()
            return loss

        return step

    def usual(
        self, around: Step | None = None, batch: int = 0, dropout: float = 0.0, dtype: torch.dtype = torch.float32
    ) -> Step:
        x = torch.randn(batch or self.batch, self.wide, device=self.device, dtype=dtype)
        return self.trained(self.perceptron(self.wide, 3, dropout).to(dtype), x, around)

    def small(self, around: Step | None = None, **options: Any) -> Callable[[], torch.Tensor]:
        """Many small layers, that the host cannot launch as fast as the device runs them."""
        return self.trained(self.perceptron(128, 24), torch.randn(32, 128, device=self.device), around, **options)

    def read(self) -> Step:
        """The loss is read in each step, as where it is logged."""
        step = self.small()
        return lambda: step().item()

    def loaded(self, workers: int | None) -> Step:
        """Batches of samples that take 0.25 ms each; None: one batch for all steps."""
        width = self.wide // 2
        x, ready = torch.randn(32, width, device=self.device), torch.randn(32, width)
        step = self.trained(self.perceptron(width, 2), x)
        batches = iter(() if workers is None else DataLoader(Samples(width, 0.25), batch_size=32, num_workers=workers))

        def take() -> object:
            x.copy_(ready if workers is None else next(batches)[0])
            return step()

        return take

    def decoder(self, batch: int, dtype: torch.dtype = torch.float32, layers: int = 4, **options: Any) -> Step:
        """Layers of attention over 512 tokens (64 on a CPU), with a head of ten classes."""
        width, tokens = (1024, 512) if self.on_gpu else (128, 64)
        model = nn.Sequential(*(Attention(width, width // 64) for _ in range(layers)), Mean(), nn.Linear(width, 10))
        x = torch.randn(batch, tokens, width, device=self.device, dtype=dtype)
        return self.trained(model.to(self.device, dtype), x, **options)

    def inferred(self, replayed: bool = False) -> Step:
        """The small model in inference, and as a CUDA graph."""
        model, x = self.perceptron(128, 24).eval(), torch.randn(32, 128, device=self.device)

        def step() -> object:
            with torch.no_grad():
                return model(x)

        return self._replayed(step) if replayed else step

    def _replayed(self, step: Step) -> Step:
        """As a CUDA graph, warmed up on a stream of its own, as PyTorch's documentation asks."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()

        def replayed() -> Step:
            """What the step closes over lives as long as the graph that reads it."""
            graph.replay()
            return step

        return replayed

    def normed(self, norms: int, kind: Callable[[int], nn.Module] = nn.LayerNorm) -> Step:
        """Products with so many norms after each, in inference."""
        layers = [
            part
            for _ in range(4)
            for part in (nn.Linear(self.wide, self.wide), *(kind(self.wide) for _ in range(norms)))
        ]
        model, x = nn.Sequential(*layers).to(self.device), torch.randn(self.batch, self.wide, device=self.device)

        def step() -> object:
            with torch.no_grad():
                return model(x)

        return step

    def copied(self, how: str) -> Step:
        """A batch that comes from the host's memory in each step: pageable, pinned, or not at all."""
        model, x = self.perceptron(self.wide, 2), torch.randn(self.batch, self.wide, device=self.device)
        host, step = torch.randn(self.batch, self.wide), self.trained(model, x)
        host = host.pin_memory() if how == "pinned" else host

        def copying() -> object:
            x.copy_(host, non_blocking=how == "pinned")
            return step()

        return step if how == "none" else copying

    def convolved(self, last: bool = False, flips: bool = False) -> Step:
        """Convolutions, with their input mirrored in each step."""
        model = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(6))).to(self.device)
        x = torch.randn(64 if self.on_gpu else 2, 64, 56, 56, device=self.device)
        if last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            x = x.to(memory_format=torch.channels_last)

        def step() -> object:
            with torch.no_grad():
                return model(torch.flip(x, (3,)) if flips else x)

        return step

    def changes(self) -> Iterator[Change]:
        kept = [[at] for at in range(50_000)]
        text = {str(at): [at] * 40 for at in range(500)}
        yield Change("no sleep", "class:sleep and locks", lambda: self.usual(lambda: time.sleep(0.004)), self.usual)
        yield Change(
            "no collection", "class:garbage collection", lambda: self.small(lambda: (gc.collect(), kept)), self.small
        )
        yield Change("no JSON", "gone:dumps", lambda: self.small(lambda: json.dumps(text)), self.small)
        yield Change("no printing", "class:I/O", lambda: self.usual(self._printing()), self.usual)
        yield Change("no loading", "class:data", lambda: self.loaded(0), lambda: self.loaded(None))
        yield Change("two workers", "workers:2", lambda: self.loaded(0), lambda: self.loaded(2))
        yield Change("twice the batch", "batch:2", self.usual, lambda: self.usual(batch=2 * self.batch))
        yield Change("four times the batch", "batch:4", self.usual, lambda: self.usual(batch=4 * self.batch))
        yield Change("a decoder's batch, twice", "batch:2", lambda: self.decoder(8), lambda: self.decoder(16))
        yield Change("a fused optimizer", "optimizer", lambda: self.small(fused=False, foreach=False), self.small)
        dropout = "aten::*dropout*" if self.on_gpu else "aten::dropout,MulBackward0,DivBackward0"
        yield Change("no dropout", f"gone:{dropout}", lambda: self.usual(dropout=0.1), self.usual)
        yield Change("no second norm", "gone:aten::native_layer_norm", lambda: self.normed(1), lambda: self.normed(0))
        yield Change("no flip", "gone:aten::flip", lambda: self.convolved(flips=True), self.convolved)
        if self.on_gpu:
            yield from self._on_gpus()

    def _on_gpus(self) -> Iterator[Change]:
        yield Change("half the batch", "batch:0.5", lambda: self.usual(batch=2 * self.batch), self.usual)
        yield Change("a list's optimizer", "optimizer", lambda: self.small(fused=False, foreach=True), self.small)
        yield Change("no reading of the loss", "class:device", self.read, self.small)
        yield Change("no synchronisation", "class:device", lambda: self.small(torch.cuda.synchronize), self.small)
        yield Change("no empty_cache", "class:allocator", lambda: self.usual(torch.cuda.empty_cache), self.usual)
        yield Change("a CUDA graph", "graph", self.inferred, lambda: self.inferred(True))
        yield Change(
            "a graph of training", "graph", lambda: self.small(capturable=True),
            lambda: self._replayed(self.small(capturable=True)),
        )  # fmt: skip
        yield Change("no copy", "gone:*Memcpy HtoD*", lambda: self.copied("pageable"), lambda: self.copied("none"))
        yield Change("pinned memory", "pinned", lambda: self.copied("pageable"), lambda: self.copied("pinned"))
        yield Change("channels last", _COPIES, self.convolved, lambda: self.convolved(last=True))
        yield Change(
            "norms at their floor", "floor:aten::native_layer_norm", lambda: self.normed(4),
            lambda: self.normed(4, OwnNorm),
        )  # fmt: skip
        yield Change("bf16", "bf16", self.usual, lambda: self.usual(dtype=torch.bfloat16))
        yield Change("a decoder in bf16", "bf16", lambda: self.decoder(8), lambda: self.decoder(8, torch.bfloat16))

    def _printing(self) -> Step:
        out, shown = Path(tempfile.gettempdir(), "whatif.txt").open("w"), torch.randn(40, 40)  # noqa: SIM115
        return lambda: print(shown, file=out)


class Mean(nn.Module):
    """Over the tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)
