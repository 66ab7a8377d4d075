"""Random shapes of attention and decoding in compiled programs, beside cuDNN and FlashAttention-2.

    python -m benchmarks.attention_shapes --seeds 50 --out benchmarks/results/h200/attention_shapes.jsonl
    python -m benchmarks.attention_shapes --device cpu --seeds 3 --tiny

A seed draws heads, groups, head size, lengths, mask and layout. `tilewright` is the program that `torch.compile` makes
after the races of `tilewright optimize`; `kernels` are tilewright's own, `cudnn` and `flash2` PyTorch's, each forced.
All are timed interleaved, without the host's time, and compared with float64 (fp32 beyond `MOST_EXACT` scores) on the
first and the last group of heads. The table gives the ratio of the fastest of the three to `tilewright`.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.backend import backend
from tilewright.compile.price import price_case
from tilewright.functional import attention
from tilewright.hardware.target import target_of
from tilewright.kernels.attention import reference
from tilewright.launch.executor import EXTENSION
from tilewright.measure.racing.results import append_results, environment, measurement, sources_of_programs
from tilewright.measure.timing.benchmark import Timing, interleaved
from tilewright.measure.timing.stopwatch import Lap, Stopwatch, stopwatch_for
from tilewright.records.measurement import Direction, Measurement
from tilewright.verbs.explanation import case_of

SUITE = "attention_shapes"
OURS, KERNELS = "tilewright", "kernels"
LIBRARIES = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}
SIZES = (32, 40, 64, 72, 80, 96, 128, 160, 192, 256)
MASKS = ("none", "causal", "causal", "boolean", "additive", "window")
LAYOUTS = ("bhsd", "bshd", "packed")
MOST_TOKENS = 2**25
"""Elements of q and k together."""
MOST_SCORES = 2**33
MOST_EXACT = 2**28
"""Scores of a group of heads that are computed in float64."""
LEAD = 4.0
"""The device waits for this multiple of a call's least host time, so that no host time is measured."""
Call = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    """One attention: `queries` are fewer than `keys` in decoding."""

    batch: int
    heads: int
    groups: int
    """Heads of keys and values."""
    queries: int
    keys: int
    size: int
    mask: str
    layout: str
    dtype: torch.dtype

    @property
    def decodes(self) -> bool:
        return self.queries < self.keys

    @property
    def name(self) -> str:
        """As `4×24/4 S2222 d96 causal bshd bf16`; queries before the keys where these are more."""
        length = f"{self.queries}→{self.keys}" if self.decodes else str(self.keys)
        short = str(self.dtype).removeprefix("torch.").replace("bfloat16", "bf16").replace("float16", "fp16")
        heads = f"{self.batch}×{self.heads}/{self.groups}"
        return f"{heads} S{length} d{self.size} {self.mask} {self.layout} {short}"


def drawn(seed: int, tiny: bool = False) -> Shape:
    """The shape of a seed; every third one decodes."""
    pick = random.Random(seed)
    decodes = seed % 3 == 2
    groups, group = pick.choice((1, 2, 4, 8, 8, 12, 16)), pick.choice((1, 1, 2, 4, 5, 8))
    keys = int(2 ** pick.uniform(0 if not decodes else 7, 14)) if not tiny else pick.randint(1, 40)
    queries = pick.choice((1, 1, 1, 2, 4)) if decodes else keys
    queries, size = min(queries, keys), pick.choice(SIZES)
    mask = pick.choice(("none", "none", "boolean", "additive") if decodes else MASKS)
    layout = "bhsd" if decodes else pick.choice(LAYOUTS)
    if layout == "packed":
        group = 1
    batch = pick.choice((1, 1, 2, 4, 8, 16, 32, 64)) if not tiny else 2
    heads = groups * group
    while batch > 1 and (batch * heads * keys * size > MOST_TOKENS or batch * heads * queries * keys > MOST_SCORES):
        batch //= 2
    dtype = pick.choice((torch.bfloat16, torch.bfloat16, torch.float16))
    return Shape(batch, heads, groups, queries, keys, size, mask, layout, dtype)


def operands(shape: Shape, device: str, seed: int) -> list[Tensor]:
    """q, k and v, or the three packed, and the mask if it is a tensor."""
    s, generator = shape, torch.Generator(device).manual_seed(seed)
    random_normal = functools.partial(torch.randn, dtype=s.dtype, device=device, generator=generator)
    if s.layout == "packed":
        found = [random_normal(s.batch, s.keys, 3, s.heads, s.size)]
    else:
        lengths = (s.heads, s.queries), (s.groups, s.keys), (s.groups, s.keys)
        orders = [(h, n) if s.layout == "bhsd" else (n, h) for h, n in lengths]
        found = [random_normal(s.batch, *order, s.size) for order in orders]
    if s.mask in ("boolean", "additive"):
        seen = torch.rand(s.batch, 1, s.queries, s.keys, device=device, generator=generator) < 0.9
        seen[..., 0] = True
        hidden = torch.finfo(s.dtype).min
        bias = random_normal(s.batch, 1, s.queries, s.keys).masked_fill_(~seen, hidden)
        found.append(seen if s.mask == "boolean" else bias)
    return found


def by_heads(shape: Shape, given: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k and v as [B, H, S, d], and the mask."""
    mask = given[-1] if shape.mask in ("boolean", "additive") else None
    if shape.layout == "packed":
        q, k, v = given[0].permute(2, 0, 3, 1, 4)
    else:
        q, k, v = (x if shape.layout == "bhsd" else x.transpose(1, 2) for x in given[:3])
    return q, k, v, mask


def window_of(shape: Shape) -> int:
    """Keys before its own that a query sees."""
    return max(1, shape.keys // 8)


def program(shape: Shape, *given: Tensor) -> Tensor:
    """As a model writes it: one call of PyTorch's operator, with a mask of places for a window."""
    q, k, v, mask = by_heads(shape, given)
    if shape.mask == "window":
        place = torch.arange(shape.keys, device=q.device)
        away = place[:, None] - place
        mask = (away >= 0) & (away <= window_of(shape))
    causal, shared = shape.mask == "causal", shape.heads != shape.groups
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=shared)


def in_library(backend: SDPBackend, shape: Shape, *given: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return program(shape, *given)


def in_kernels(shape: Shape, *given: Tensor) -> Tensor:
    """By tilewright's kernels, whatever a race says."""
    q, k, v, mask = by_heads(shape, given)
    window = (window_of(shape), 0) if shape.mask == "window" else (None, None)
    out: Tensor = attention(q, k, v, causal=shape.mask == "causal", window=window, mask=mask)
    return out


def with_gradients(function: Callable[..., Tensor], given: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    out = function(*given)
    wanted = [x for x in given if x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]


def compiled(shape: Shape, given: Sequence[Tensor], training: bool) -> Callable[..., Tensor]:
    """The program, compiled with the outcomes of races that are run now."""

    def subject(*inputs: Tensor) -> Tensor:
        return program(shape, *inputs)

    if given[0].is_cuda:
        target = replace(target_of(given[0].device), measures=True)
        price_case(case_of(subject, tuple(given), training), target)
    torch._dynamo.reset()
    call: Callable[..., Tensor] = torch.compile(subject, backend=backend, dynamic=False)
    return call


def calls_of(shape: Shape, given: Sequence[Tensor], training: bool, grad: Tensor) -> dict[str, Call]:
    """The entrants that take the shape, by name."""
    functions: dict[str, Callable[..., Tensor]] = {OURS: compiled(shape, given, training)}
    functions[KERNELS] = functools.partial(in_kernels, shape)
    if given[0].is_cuda:
        functions |= {name: functools.partial(in_library, one, shape) for name, one in LIBRARIES.items()}
    found: dict[str, Call] = {}
    for name, function in functions.items():
        call = (
            functools.partial(with_gradients, function, given, grad)
            if training
            else functools.partial(function, *given)
        )
        try:
            call()
        except RuntimeError:
            if name not in LIBRARIES:
                raise
            continue
        found[name] = call
    return found


def exact(shape: Shape, given: Sequence[Tensor], training: bool, grad: Tensor, entry: int, head: int) -> list[Tensor]:
    """What one group of heads gives: its part of the output, and of the gradients of q, k and v."""
    group, causal = shape.heads // shape.groups, shape.mask == "causal"
    wide = torch.float64 if group * shape.queries * shape.keys <= MOST_EXACT else torch.float32
    q, k, v, mask = by_heads(shape, [x.detach() for x in given])
    q = q[entry : entry + 1, head * group : (head + 1) * group]
    q, k, v = (
        x.to(wide).requires_grad_(training) for x in (q, *(y[entry : entry + 1, head : head + 1] for y in (k, v)))
    )
    part = None if mask is None else mask[entry : entry + 1]
    window = (window_of(shape), 0) if shape.mask == "window" else (None, None)
    out, _ = reference.attention(q, k, v, causal=causal, window=window, mask=part)
    if not training:
        return [out]
    own = grad[entry : entry + 1, head * group : (head + 1) * group].to(wide)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), own)]


def error(shape: Shape, results: Sequence[Tensor], expected: Sequence[Tensor], entry: int, head: int) -> float:
    """The largest relative norm error of the output and the gradients."""
    group = shape.heads // shape.groups
    parts = [results[0], *by_heads(shape, results[1:])[:3]] if len(results) > 1 else [results[0]]
    heads = [slice(head * group, (head + 1) * group)] * 2 + [slice(head, head + 1)] * 2
    errors = []
    for part, right, which in zip(parts, expected, heads, strict=False):
        mine = part[entry : entry + 1, which].to(right.dtype)
        # A gradient that is zero in exact numbers has no relative error.
        errors.append(float((mine - right).norm() / right.norm().clamp_min(1e-3 * mine.numel() ** 0.5)))
    return max(errors)


def timed(calls: Mapping[str, Call], device: str, seconds: float) -> dict[str, Timing]:
    """Device times, interleaved."""
    watch: Stopwatch = stopwatch_for(device)

    def lap(call: Call, host_us: float, _: int) -> Lap:
        watch.lead(LEAD * host_us)
        return watch.time(call)

    host = {name: min(watch.time(call).host_us or 0.0 for _ in range(3)) for name, call in calls.items()}
    entries = {name: functools.partial(lap, call, host[name]) for name, call in calls.items()}
    return interleaved(entries, watch.now, min_repeats=10, max_seconds=seconds)


def built(seed: int, shape: Shape, device: str) -> None:
    """Compile tilewright's kernels for a shape: many processes do so side by side, before anything is timed."""
    for training in (False,) if shape.decodes else (False, True):
        given = inputs(seed, shape, training, device)
        with torch.set_grad_enabled(training):
            out = in_kernels(shape, *given)
            if training:
                out.sum().backward()


def inputs(seed: int, shape: Shape, training: bool, device: str) -> list[Tensor]:
    """`operands`, those of the attention with gradients in training."""
    given = operands(shape, device, seed)
    trained = given[: 1 if shape.layout == "packed" else 3]
    return [x.requires_grad_(training) for x in trained] + given[len(trained) :]


def raced(seed: int, shape: Shape, training: bool, device: str, seconds: float) -> list[Measurement]:
    """The rows of one shape and direction."""
    given = inputs(seed, shape, training, device)
    generator = torch.Generator(device).manual_seed(seed + 1)
    grad_shape = (shape.batch, shape.heads, shape.queries, shape.size)
    grad = torch.randn(grad_shape, dtype=shape.dtype, device=device, generator=generator)
    with torch.set_grad_enabled(training):
        calls = calls_of(shape, given, training, grad)
        errors = dict.fromkeys(calls, 0.0)
        for entry, head in {(0, 0), (shape.batch - 1, shape.groups - 1)}:
            expected = exact(shape, given, training, grad, entry, head)
            for name, call in calls.items():
                results = call() if training else [call()]
                errors[name] = max(errors[name], error(shape, results, expected, entry, head))
        times = timed(calls, device, seconds)
    where = environment(torch.cuda.get_device_name(device) if device != "cpu" else "cpu")
    direction: Direction = "fwd+bwd" if training else "fwd"
    return [
        measurement(
            timing,
            where,
            suite=SUITE,
            case=f"{seed} {shape.name}",
            impl=name,
            direction=direction,
            error=errors[name],
            made_from=sources_of_programs(OURS) if name in (OURS, KERNELS) else (),
        )
        for name, timing in times.items()
    ]


def line(rows: Sequence[Measurement]) -> str:
    """One line of the table: microseconds and errors, and how many times as fast as the fastest other it is."""
    by = {row.impl: row for row in rows}
    best = min(row.median_us for name, row in by.items() if name != OURS)
    ratio = best / by[OURS].median_us
    figures = "  ".join(f"{name} {row.median_us:.1f} ({row.error:.0e})" for name, row in by.items())
    return f"{ratio:.3f}{'  ' if ratio >= 0.98 else ' !'} {by[OURS].case} {by[OURS].direction}: {figures}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can take")
    parser.add_argument("--seconds", type=float, default=0.5, help="of timing for one shape and direction")
    parser.add_argument("--out", type=Path, help="result file to which rows are added")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile kernels first")
    options = parser.parse_args()
    shapes = {seed: drawn(seed, options.tiny) for seed in range(options.first, options.first + options.seeds)}
    if options.jobs:
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            pool.starmap(built, [(*one, options.device) for one in shapes.items()], chunksize=1)
    # Until then programs run as PyTorch runs them.
    EXTENSION.module()
    EXTENSION.wait()
    for seed, shape in shapes.items():
        for training in (False,) if shape.decodes else (False, True):
            rows = raced(seed, shape, training, options.device, options.seconds)
            print(line(rows), flush=True)
            if options.out:
                append_results(options.out, rows)


if __name__ == "__main__":
    main()
