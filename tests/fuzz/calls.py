"""Random calls of the hand-written operators: sizes, dtypes, values, and how their tensors lie in memory.

Every tensor lies in storage that is NaN elsewhere, so that what is read beside it shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.kernels.attention.calls import Call
from tests.proving import prove
from tilewright.bench.catalogue import suite
from tilewright.records.measurement import Verified

Sizes = Callable[[random.Random, bool], tuple[int, ...]]
FEW = (1, 2, 3, 7, 8, 31, 64, 96, 127, 255, 256, 257)
COLUMNS = (*FEW, 1000, 1024, 1025, 4096, 4999, 8192, 16411, 33000, 50257, 65536, 65537, 100003, 262145)
ROWS = (0, 1, 2, 3, 17, 131, 133, 265, 1000)
MOST = 2**23
"""Elements of a matrix, so that its float64 reference does not take long."""
LAYOUTS = ("whole", "whole", "shifted", "wide", "transposed", "every other", "repeated")
DTYPES = ("bfloat16", "float16", "float32")


def _rows(r: random.Random, small: bool) -> tuple[int, ...]:
    columns = r.choice(FEW if small else COLUMNS)
    return min(r.choice(ROWS), (2**12 if small else MOST) // columns), columns


def _product(r: random.Random, small: bool) -> tuple[int, ...]:
    sizes = [r.choice(FEW if small else (*FEW, 768, 1000, 1024)) for _ in range(3)]
    # The kernels of tensor cores take rows of 16 bytes.
    return tuple(max(8, size // 8 * 8) for size in sizes) if r.random() < 0.6 else tuple(sizes)


def _vocabulary(r: random.Random, small: bool) -> tuple[int, ...]:
    return r.choice((3, 17, 131)), r.choice((1, 8, 31, 64)), r.choice((1, 2, 33, 100 if small else 5003))


NAMES: dict[str, Sizes] = {
    **dict.fromkeys(("softmax", "log_softmax", "cross_entropy", "weighted_sum", "dropout_add"), _rows),
    **dict.fromkeys(("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"), _rows),
    **dict.fromkeys(("gelu", "swiglu"), _rows),
    **dict.fromkeys(("linear_gelu", "linear_dropout_add", "matmul"), _product),
    "linear_cross_entropy": _vocabulary,
}
"""Operators, with what their workloads' sizes are drawn from; `small` where a CPU computes them."""

SEVERAL = ("add_layer_norm", "add_rms_norm")
"""Those of several results, of which eager gives a gradient to those alone that an input with one reaches."""


def laid(x: torch.Tensor, layout: str, r: random.Random) -> torch.Tensor:
    """The values of x as they lie in one of `LAYOUTS`; one slice of x along one dimension where it is repeated."""
    if x.dim() == 0 or x.numel() == 0:
        return x.detach()
    shape, order = list(x.shape), list(range(x.dim()))
    repeated = r.randrange(x.dim())
    if layout == "transposed":
        r.shuffle(order)
    if layout == "repeated":
        shape[repeated] = 1
    gap = r.choice((1, 3, 8, 64)) if layout == "wide" else 0
    step, strides = 2 if layout == "every other" else 1, [0] * x.dim()
    for place, dim in enumerate(reversed(order)):
        strides[dim] = step
        step *= shape[dim] + (gap if place == 0 else 0)
    start = 64 + (r.randrange(1, 16) if layout == "shifted" else 0)
    fill = float("nan") if x.is_floating_point() else 0
    storage = torch.full((start + step + 64,), fill, dtype=x.dtype, device=x.device)
    inner = storage.as_strided(shape, strides, start)
    return inner.copy_(x.detach().narrow(repeated, 0, shape[repeated])).expand(x.shape)


def with_outliers(x: torch.Tensor) -> torch.Tensor:
    """x with a few values times 30."""
    flat = x.detach().flatten().clone()
    if x.is_floating_point():
        flat[:: 1 + x.numel() // 5] *= 30
    return flat.view(x.shape)


def broken(number: int, device: torch.device) -> tuple[str, list[Verified]]:
    """Call `number` of an operator in words, and what breaks the contract."""
    r, small = random.Random(number), device.type == "cpu"
    name = r.choice([name for name in NAMES if "tilewright" in [variant.name for variant in suite(name).variants]])
    sizes, dtype = NAMES[name](r, small), r.choice(DTYPES)
    operator = suite(name)
    made = operator.workload(sizes, dtype).make(device, torch.Generator(device).manual_seed(number))
    inputs: list[Any] = []
    words = [name, str(sizes), dtype]
    for value in made:
        if isinstance(value, torch.Tensor):
            layout, graded = r.choice(LAYOUTS), value.requires_grad and (name in SEVERAL or r.random() < 0.8)
            value = laid(with_outliers(value) if r.random() < 0.4 else value, layout, r).requires_grad_(graded)
            words.append(f"{layout}{list(value.stride())}{' grad' if value.requires_grad else ''}")
        inputs.append(value)
    rows = prove(operator, operator.variant("tilewright").function, inputs, seed=number)
    return " ".join(words), [row for row in rows if not row.ok]


def attention(number: int) -> Call:
    """Call `number` of attention on a GPU, in 16 bits, where its options have kernels of their own."""
    r = random.Random(number)
    lengths: Sequence[int] = (1, 3, 64, 113, 128, 203, 256, 799, 1023, 1025)
    queries, keys = r.choice(lengths), r.choice(lengths)
    heads, kv_heads = r.choice(((1, 1), (2, 2), (4, 2), (6, 2), (8, 1)))
    drawn: dict[str, tuple[Any, ...]] = {
        "causal": (True,),
        "window": ((0, 0), (5, None), (64, 100), (None, -3), (300, 0)),
        "scale": (0.0, -0.3, 1.0),
        "softcap": (0.1, 1.5, 30.0),
        "deterministic": (True,),
    }
    options = {name: r.choice(values) for name, values in drawn.items() if r.random() < 0.2}
    return Call(
        batch=r.choice((1, 2)),
        heads=heads,
        kv_heads=kv_heads,
        queries=queries,
        keys=queries if r.random() < 0.4 else keys,
        head_size=r.choice((16, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256)),
        value_size=r.choice((0, 0, 0, 16, 64, 128, 256)),
        dtype=r.choice((torch.bfloat16, torch.float16)),
        mask=r.choice(("", "", "", "", "boolean", "additive", "keys", "rows")),
        slopes=r.random() < 0.15,
        layout=r.choice(("heads", "heads", "positions", "misaligned", "last", "repeated")),
        outliers=r.random() < 0.6,
        options=options,
    )
