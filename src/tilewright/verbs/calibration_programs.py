"""The programs whose kernels are timed for the model of times: every kind, at the sizes that models have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright import functional
from tilewright.verbs.calibration import Program

ROWS = (
    (256, 768), (1024, 512), (2048, 1024), (4096, 768), (8192, 768), (12608, 768), (12000, 512), (8192, 2048),
    (4096, 4096), (8192, 4096), (1024, 32000), (512, 128256), (4096, 30522), (4096, 50304), (8192, 32000),
)  # fmt: skip
"""Rows and columns of activations and logits."""
PRODUCTS = (
    (1024, 512, 512), (1024, 2048, 512), (4096, 768, 768), (4096, 3072, 768), (4096, 768, 3072), (8192, 768, 768),
    (8192, 2304, 768), (8192, 3072, 768), (12608, 768, 768), (12608, 3072, 768), (8192, 2048, 2048),
    (8192, 5632, 2048), (8192, 2048, 5632), (8192, 512, 2048), (12000, 512, 512), (12000, 2048, 512),
    (8192, 32000, 2048), (128, 4096, 4096), (16, 4096, 4096), (1, 4096, 4096),
)  # fmt: skip
"""M, N and K."""
ATTENTION = ((8, 12, 512, 64), (8, 12, 1024, 64), (64, 12, 197, 64), (8, 32, 1024, 64), (2, 16, 4096, 128))
"""Batch, heads, places and head size."""
IMAGES = ((64, 64, 56, 56), (64, 256, 28, 28), (64, 512, 14, 14))
THIN = 64
"""K of the products before other kernels."""
LONGEST_ROW = 8192
"""Columns of activations; logits are longer."""


def programs(device: str) -> Mapping[str, Sequence[Program]]:
    """By group. On a CPU the sizes are a thirty-second of a GPU's."""
    smaller = 32 if device == "cpu" else 1
    rows = [(max(n // smaller, 8), m) for n, m in ROWS]
    short = [shape for shape in rows if shape[1] <= LONGEST_ROW]
    products = [(max(m // smaller, 1), n, k) for m, n, k in PRODUCTS]
    linear = [((m, k), (n, k)) for m, n, k in products]
    batch = [tuple([max(shape[0] // smaller, 1), *shape[1:]]) for shape in ATTENTION]
    images = [(max(n // smaller, 1), *shape) for n, *shape in IMAGES]
    made = [((n, THIN), (THIN, m)) for n, m in short]
    with_other = [(*two, shape) for two, shape in zip(made, short, strict=True)]
    with_vectors = [(*two, shape[1:], shape[1:]) for two, shape in zip(made, short, strict=True)]
    return {
        "products": _each("linear", F.linear, linear, together=10),
        "gelu": _each("gelu", _after_product(F.gelu), made),
        "gate": _each("gate", _after_product(lambda x, y: F.silu(x) * y), with_other),
        "sum": _each("sum", _after_product(_cast_sum), with_other),
        "bias": _each("bias", _after_product(lambda x, b: torch.tanh(x + b)), [(*two, two[1][1:]) for two in made]),
        "softmax": _each("softmax", lambda x: torch.softmax(x, -1), [(shape,) for shape in rows]),
        "log_softmax": _each("log_softmax", lambda x: torch.log_softmax(x, -1), [(shape,) for shape in rows]),
        "layer_norm": _each("layer_norm", _after_product(_layer_norm), with_vectors),
        "transposed": _each(
            "transposed",
            lambda x, w, b: _layer_norm(x.view(x.shape[1], x.shape[0]).t(), w, b),
            [(s, s[1:], s[1:]) for s in short],
            together=4,
        ),
        "layouts": _each("layouts", lambda x: x.t().contiguous(), [(shape,) for shape in short], training=False),
        "gathers": _each("gathers", lambda x: F.embedding(_scattered(x, 0), x), [(shape,) for shape in short]),
        "attention": _each("attention", _attention, [(s, s, s) for s in batch]),
        "own_attention": _each("own attention", _own_attention, [(s, s, s) for s in batch]),
        "convolutions": _each(
            "convolution", lambda x, w: F.conv2d(x, w, padding=1), [(s, (s[1], s[1], 3, 3)) for s in images]
        ),
        "losses": _each(
            "loss", lambda x: F.cross_entropy(x, _scattered(x, 1)), [(shape,) for shape in rows if shape not in short]
        ),
        "own_norms": _each("own layer_norm", _after_product(functional.layer_norm), with_vectors),
        "own_sums": _each(
            "own add_layer_norm",
            _after_product(functional.add_layer_norm),
            [(*two, shape, shape[1:], shape[1:]) for two, shape in zip(made, short, strict=True)],
        ),
        "own_softmax": _each("own softmax", functional.softmax, [(shape,) for shape in rows]),
        "own_losses": _each(
            "own loss", lambda x: functional.cross_entropy(x, _scattered(x, 1)), [(shape,) for shape in rows]
        ),
    }


def _each(
    name: str,
    function: Callable[..., Any],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    *,
    together: int = 12,
    training: bool = True,
) -> list[Program]:
    """Programs that call `function` for some of the shapes each, since capturing one costs a second."""
    found = []
    for start in range(0, len(shapes), together):
        some = shapes[start : start + together]
        per_call = len(some[0])

        def whole(*tensors: Tensor, per_call: int = per_call) -> list[Any]:
            return [function(*tensors[at : at + per_call]) for at in range(0, len(tensors), per_call)]

        flat = [shape for group in some for shape in group]
        found.append(Program(name, whole, flat, training, "" if function is F.linear else "product"))
    return found


def _after_product(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of a product that was just written, as in a model, and of tensors that were not."""

    def call(x: Tensor, w: Tensor, *others: Tensor) -> Any:
        return function(x @ w, *others)

    return call


def _cast_sum(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float() + y.float()
    return wide, wide.to(x.dtype)


def _scattered(x: Tensor, axis: int) -> Tensor:
    """For each row of `x` a place along an axis, far from the one before it."""
    return torch.arange(x.shape[0], device=x.device) * 7919 % x.shape[axis]


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[-2] != 197)


def _own_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = functional.attention(q, k, v, causal=q.shape[-2] != 197)
    return out
