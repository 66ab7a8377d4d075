"""Activations before everything that is discontinuous in them: results and gradients beside eager and float64.

    python benchmarks/discontinuous.py --device cuda

Each program gives activations to one reader: an extreme, an argument reduction, a pooling, a comparison, a sort, a
quantiser or a draw. Backward compares the activation with the extreme, so it must have forward's bits. fp32, bf16 and
fp16; prints what breaks the numbers contract. Exit code 8 if something does.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.backend import backend
from tilewright.measure.truth.verify import verify
from tilewright.records.errors import VerificationError
from tilewright.records.measurement import Verified

Function = Callable[[Tensor], Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS, COLUMNS = 7, 37
BUNDLE = 8
"""Activations in one program: each with its own input, so that they share no kernel."""

ACTIVATIONS: dict[str, Function] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.2, dtype=x.dtype, device=x.device)),
    "rrelu": F.rrelu,
    "threshold": lambda x: F.threshold(x, 0.1, -0.5),
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.7),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": F.hardtanh,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "tanhshrink": F.tanhshrink,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "logsigmoid": F.logsigmoid,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "sin": torch.sin,
    "cos": torch.cos,
    "exp": torch.exp,
    "erf": torch.erf,
    "atan": torch.atan,
    "asinh": torch.asinh,
    "log1p": lambda x: x.abs().log1p(),
    "rsqrt": lambda x: (x * x + 1).rsqrt(),
    "quotient": lambda x: x / 3,
    "power": lambda x: (x.abs() + 0.5) ** 1.7,
    "polynomial": lambda x: x * x * 0.3 + x * 1.7,
    "swiglu": lambda x: F.silu(x) * x.roll(1, -1),
    "glu": lambda x: F.glu(torch.cat([x, x.flip(-1)], -1)),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (COLUMNS,)),
    "rms_norm": lambda x: F.rms_norm(x, (COLUMNS,)),
}


def _places(v: Tensor) -> Tensor:
    return (torch.arange(v.numel(), device=v.device).view_as(v) * 5) % 4


def _scattered(kind: str) -> Function:
    return lambda v: v.new_zeros(5, COLUMNS).scatter_reduce(0, _places(v), v, kind, include_self=False)


def _image(v: Tensor) -> Tensor:
    return v[:, :36].reshape(1, ROWS, 6, 6)


def _fractional(v: Tensor) -> Tensor:
    samples = torch.full((1, ROWS, 2), 0.3, dtype=v.dtype, device=v.device)
    return F.fractional_max_pool2d(_image(v), 2, 3, _random_samples=samples)


def _rounded(v: Tensor) -> Tensor:
    """Symmetric quantisation to 8 bits, straight through."""
    scale = v.detach().abs().amax() / 127
    return v + ((v / scale).round() * scale - v).detach() * (v.abs() <= 100 * scale)


READERS: dict[str, Function] = {
    "amax": lambda v: v.amax(-1),
    "amax_columns": lambda v: v.amax(0),
    "amax_all": lambda v: v.amax(),
    "amin": lambda v: v.amin(-1),
    "max": torch.max,
    "min": torch.min,
    "max_dim": lambda v: v.max(-1).values,
    "min_dim": lambda v: v.min(0).values,
    "aminmax": lambda v: torch.stack(list(torch.aminmax(v, dim=-1))),
    "norm_inf": lambda v: torch.linalg.vector_norm(v, inf, -1),
    "norm_minus_inf": lambda v: torch.linalg.vector_norm(v, -inf, 0),
    "scaled_by_amax": lambda v: v / v.abs().amax(-1, keepdim=True),
    "scatter_amax": _scattered("amax"),
    "scatter_amin": _scattered("amin"),
    "index_reduce": lambda v: v.new_zeros(4, COLUMNS).index_reduce(0, _places(v)[:, 0], v, "amax", include_self=False),
    "topk": lambda v: v.topk(3, -1).values,
    "sort": lambda v: v.sort(-1).values * torch.arange(COLUMNS, device=v.device),
    "argsort": lambda v: v.gather(-1, v.argsort(-1)[:, :5]),
    "median": torch.median,
    "median_dim": lambda v: v.median(-1).values,
    "kthvalue": lambda v: v.kthvalue(5, -1).values,
    "cummax": lambda v: v.cummax(-1).values,
    "cummin": lambda v: v.cummin(0).values,
    "argmax": lambda v: v.gather(-1, v.argmax(-1, keepdim=True)),
    "argmin": lambda v: v.gather(0, v.argmin(0, keepdim=True)),
    "max_pool1d": lambda v: F.max_pool1d(v[None], 3, 2),
    "max_pool2d": lambda v: F.max_pool2d(_image(v), 3, 2, 1),
    "adaptive_max_pool": lambda v: F.adaptive_max_pool2d(_image(v), (3, 4)),
    "fractional_max_pool": _fractional,
    "maximum": lambda v: torch.maximum(v, v.flip(-1) * 0.9),
    "clamp": lambda v: v.clamp(-0.3, 0.6),
    "clamp_by_amax": lambda v: torch.minimum(v, v.amax(-1, keepdim=True).detach()),
    "equal": lambda v: torch.where(v == v.amax(-1, keepdim=True), v * 2, v),
    "greater": lambda v: torch.where(v > v.roll(1, 0), v, v * 0.5),
    "at_least_amax": lambda v: v.masked_fill(v >= v.amax(0, keepdim=True), 0.0) * v.sigmoid(),
    "positive": lambda v: v * (v > 0),
    "absolute": torch.abs,
    "sign": lambda v: v * v.sign(),
    "product": lambda v: v.relu()[:, 5:9].prod(-1),
    "round": _rounded,
    "floor": lambda v: v - (v * 4).floor() * 0.25,
    "fake_quantize": lambda v: torch.fake_quantize_per_tensor_affine(v, 0.01, 0, -50, 50),
    "distance": lambda v: torch.cdist(v[:3], v[3:] * 0.7, p=inf),
    "integers": lambda v: v * (v * 10).to(torch.int64),
    "bernoulli": lambda v: torch.bernoulli(v.sigmoid()) * v,
}
ONLY_FLOAT32 = {"distance", "fake_quantize"}
"""Readers that PyTorch has only for fp32."""


@cache
def is_differentiable(reader: str, device: str) -> bool:
    """Whether PyTorch has the reader's gradient: torch 2.11 has none of `aminmax` on a GPU."""
    (x,) = inputs(1, torch.float32, device)
    try:
        READERS[reader](x).sum().backward()
    except RuntimeError as error:
        if f"derivative for aten::{reader} is not implemented" not in str(error):
            raise
        return False
    return True


def inputs(count: int, dtype: torch.dtype, device: str, *, training: bool = True) -> list[Tensor]:
    """The same numbers for each activation, some of them many times and some in no order."""
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3)) * 0.8
    x[1, 5:9], x[2, 30:], x[3, ::5] = x[1, 0], 0.0, x.max()
    return [x.to(device, dtype, copy=True).requires_grad_(training) for _ in range(count)]


def bundles(names: Sequence[str]) -> list[list[str]]:
    return [list(names[i : i + BUNDLE]) for i in range(0, len(names), BUNDLE)]


def program(activations: Sequence[str], reader: str) -> Callable[..., list[Tensor]]:
    """The reader's results of each activation, one for each input."""

    def run(*tensors: Tensor) -> list[Tensor]:
        return [READERS[reader](ACTIVATIONS[name](x)) for name, x in zip(activations, tensors, strict=True)]

    return run


def check(activations: Sequence[str], reader: str, dtype: torch.dtype, device: str = "cpu") -> list[Verified]:
    """A row for each result, and for each gradient that PyTorch has, of the program compiled whole."""
    torch._dynamo.reset()
    run = program(activations, reader)
    compiled = torch.compile(run, backend=backend, dynamic=False, fullgraph=True)
    training = is_differentiable(reader, device)
    return verify(run, compiled, inputs(len(activations), dtype, device, training=training))


def cases() -> Iterator[tuple[list[str], str, torch.dtype]]:
    for dtype in DTYPES:
        for reader in READERS:
            if dtype == torch.float32 or reader not in ONLY_FLOAT32:
                yield from ((names, reader, dtype) for names in bundles(list(ACTIVATIONS)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    tensors = broken = 0
    for names, reader, dtype in cases():
        for row in check(names, reader, dtype, options.device):
            tensors += 1
            if not row.ok:
                broken += 1
                print("broken", names[int("".join(filter(str.isdigit, row.tensor)))], reader, row, flush=True)
    print(f"{tensors} tensors on {options.device}, {broken} outside the contract")
    sys.exit(VerificationError.exit_code if broken else 0)


if __name__ == "__main__":
    main()
