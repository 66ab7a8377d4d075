"""The suites `layer_norm`, `rms_norm`, `add_layer_norm` and `add_rms_norm`, and every implementation of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tilewright.bench.peers import generated, inductor, library
from tilewright.bench.workloads import Draw, workloads
from tilewright.kernels import norm
from tilewright.kernels.norm import by_torch
from tilewright.records.measurement import Direction
from tilewright.records.sources import GENERATED
from tilewright.records.suite import Suite, Variant, Work, Workload

COLUMNS = (256, 1024, 4096, 5000, 8192, 16384, 32768)
"""Longer rows no model has."""
ELEMENTS = 2**28
"""Elements of x: a forward reads and writes 1 GiB in 16 bits."""
LAYER_EPS, RMS_EPS = 1e-5, 1e-6
"""That of every way. Beside the default of RMS norms, the machine epsilon, the gradient of a row of one column is
rounding alone, eager's too."""


def _in_steps(name: str) -> Callable[..., Any]:
    """The formula in PyTorch's operators, one after another."""
    centered, added = "layer" in name, name.startswith("add")

    def call(x: Tensor, *others: Tensor) -> Any:
        residual, (weight, *bias) = (others[0], others[1:]) if added else (None, others)
        eps = LAYER_EPS if centered else RMS_EPS
        found = by_torch(x, residual, weight, bias[0] if bias else None, eps, centered)
        return found[:2] if added else found[0]

    return call


def _torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, LAYER_EPS)


def _torch_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, RMS_EPS)


def _torch_add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _torch_layer_norm(total, weight, bias), total


def _torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _torch_rms_norm(total, weight), total


def _workload(name: str) -> Callable[[tuple[int, ...], str], Workload]:
    added, vectors = name.startswith("add"), 2 if "layer" in name else 1

    def operands(draw: Draw, rows: int, columns: int) -> tuple[Tensor, ...]:
        return tuple(draw(*shape) for shape in [(rows, columns)] * (1 + added) + [(columns,)] * vectors)

    def work(itemsize: int, rows: int, columns: int) -> dict[Direction, Work]:
        # Forward: x (and residual) to y (and the sum). Backward: x, dy (and that of the sum) to dx.
        matrix, weights = rows * columns * itemsize, vectors * columns * itemsize
        statistics = rows * 4 * vectors
        return {
            "fwd": Work((4 if added else 2) * matrix + weights + statistics),
            "bwd": Work((4 if added else 3) * matrix + weights + columns * itemsize + statistics),
        }

    return workloads(operands, work)


def _suite(
    name: str, summary: str, function: Callable[..., Any], torch_way: Callable[..., Any], *peers: Variant
) -> Suite:
    if "rms" in name:
        function = partial(function, eps=RMS_EPS)
    return Suite(
        name=name,
        summary=summary,
        reference=torch_way,
        workload=_workload(name),
        variants=(
            Variant("tilewright", "cuda", function, note="each element moved once; DRAM bandwidth"),
            # Before `eager`: PyTorch's own kernels are what errors are compared with.
            Variant("torch", "torch", torch_way, note="long rows and the weights' gradients are read twice"),
            Variant("eager", "torch", _in_steps(name), note="every step through memory"),
            generated(torch_way, note="rows that a program does not hold are read again"),
            inductor(torch_way, note="a second read of long rows; weights' gradients by a second pass"),
            *peers,
        ),
        sizes=tuple((ELEMENTS // columns, columns) for columns in COLUMNS),
        sources=("kernels/norm", *GENERATED),
        sweeps={"columns": tuple((2**24 // columns, columns) for columns in (2**k for k in range(6, 19)))},
    )


_FORWARD = ("fwd",)
_QUACK = "quack.rmsnorm:rmsnorm"
SUITES = {
    "layer_norm": _suite(
        "layer_norm",
        "(x - mean) / √(variance + eps) · weight + bias",
        norm.layer_norm,
        _torch_layer_norm,
        library(
            "liger",
            "liger_kernel.ops.layer_norm:LigerLayerNormFunction",
            lambda found, x, weight, bias: found.apply(x, weight, bias, LAYER_EPS),
        ),
        library(
            "quack",
            "quack.rmsnorm:layernorm_fwd",
            lambda found, x, weight, bias: found(x, weight.float(), bias.float(), eps=LAYER_EPS),
            directions=_FORWARD,
        ),
    ),
    "rms_norm": _suite(
        "rms_norm",
        "x / √(mean of x² + eps) · weight",
        norm.rms_norm,
        _torch_rms_norm,
        library(
            "liger",
            "liger_kernel.ops.rms_norm:LigerRMSNormFunction",
            lambda found, x, weight: found.apply(x, weight, RMS_EPS, 0.0, "llama", False),
        ),
        library("quack", _QUACK, lambda found, x, weight: found(x, weight, eps=RMS_EPS)),
    ),
    "add_layer_norm": _suite(
        "add_layer_norm", "layer_norm of x + residual, and the sum", norm.add_layer_norm, _torch_add_layer_norm
    ),
    "add_rms_norm": _suite(
        "add_rms_norm",
        "rms_norm of x + residual, and the sum",
        norm.add_rms_norm,
        _torch_add_rms_norm,
        library(
            "liger",
            "liger_kernel.ops.fused_add_rms_norm:LigerFusedAddRMSNormFunction",
            lambda found, x, residual, weight: found.apply(x, residual, weight, RMS_EPS, 0.0, "llama", False),
        ),
        library(
            "quack",
            _QUACK,
            lambda found, x, residual, weight: found(x, weight, residual=residual, eps=RMS_EPS, prenorm=True),
        ),
    ),
}
