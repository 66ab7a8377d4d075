"""The suites `linear_gelu` and `linear_dropout_add`: a product and what follows it, beside the bare product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tilewright.bench.peers import generated, inductor
from tilewright.bench.workloads import Draw, workloads
from tilewright.kernels.dropout_add import drawn_by_pytorch
from tilewright.kernels.linear import cuda, gelu_apart, gelu_fused, linear_dropout_add, linear_gelu
from tilewright.records.measurement import Direction
from tilewright.records.suite import Suite, Variant, Work, Workload

SIZES = ((8192, 16384, 4096), (8192, 4096, 16384), (16384, 3072, 768), (4096, 4096, 4096))
"""M, N, K of y [M, N] = x [M, K] · weight [N, K]ᵀ."""
P = 0.1
FORWARD: tuple[Direction, ...] = ("fwd",)


def _workload(residual: bool, approximate: str = "none") -> Callable[[tuple[int, ...], str], Workload]:
    def operands(draw: Draw, m: int, n: int, k: int) -> tuple[Any, ...]:
        arguments = draw(m, k), draw(n, k, std=k**-0.5), draw(n)
        return (*arguments, draw(m, n), P) if residual else (*arguments, approximate)

    def work(itemsize: int, m: int, n: int, k: int) -> dict[Direction, Work]:
        matrices = m * k + n * k + n
        ends = (2 if residual else 1) * m * n
        flops = 2 * m * n * k
        return {
            "fwd": Work((matrices + ends) * itemsize, flops=flops, limit="matmul"),
            # Incoming gradients, saved tensors, and the gradients of all inputs.
            "bwd": Work((2 * matrices + 2 * m * n) * itemsize, flops=2 * flops, limit="matmul"),
        }

    return workloads(operands, work)


def _refuses(workload: Workload) -> str | None:
    m, n, k = workload.sizes
    if not torch.cuda.is_available():
        return "no GPU"
    kind: torch.dtype = getattr(torch, workload.dtype)
    with torch.device("cuda"):
        return cuda.refuses(torch.empty(1, dtype=kind).expand(m, k), torch.empty(1, dtype=kind).expand(n, k))


def _refuses_library(workload: Workload) -> str | None:
    return None if torch.cuda.is_available() else "cuBLASLt is for GPUs"


def _bare(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.mm(x, weight.t())


_BARE = Variant(
    "cublas-bare", "library", _bare, "matrix rate", directions=FORWARD, unverified="it does the product alone"
)


def _eager_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, approximate: str) -> torch.Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


def _eager_dropout_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, p: float
) -> torch.Tensor:
    return F.dropout(F.linear(x, weight, bias), p, True) + residual


def _masked(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, p: float, mask: torch.Tensor
) -> torch.Tensor:
    return F.linear(x, weight, bias) * mask / (1.0 - p) + residual


def _draws(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> tuple[torch.Tensor]:
    return (drawn_by_pytorch(x.new_empty(len(x), len(weight)), rest[-1]),)


def _gelu_suite(name: str, approximate: str) -> Suite:
    variants = [
        Variant("tilewright", "cuda", linear_gelu, "the faster of the next two, as measured at these sizes"),
        Variant(
            "tilewright-cuda",
            "cuda",
            lambda *inputs: gelu_fused(*inputs)[0],
            "matrix rate under the power cap",
            directions=FORWARD,
            refuses=_refuses,
        ),
        Variant("tilewright-apart", "torch", lambda *inputs: gelu_apart(*inputs)[0], "the second pass over y"),
        Variant("eager", "torch", _eager_gelu, "the second pass over y"),
        generated(_eager_gelu, note="the second pass over y, where no epilogue is generated"),
        inductor(_eager_gelu, note="the second pass over y"),
        _BARE,
    ]
    if approximate == "tanh":
        by_library = Variant(
            "cublaslt",
            "library",
            lambda x, weight, bias, _: torch.ops.aten._addmm_activation(bias, x, weight.t(), use_gelu=True),
            "cuBLASLt's own epilogue",
            directions=FORWARD,
            refuses=_refuses_library,
        )
        variants.append(by_library)
    return Suite(
        name=name,
        summary=f"gelu(x · weightᵀ + bias), GELU by {'tanh' if approximate == 'tanh' else 'erf'}",
        reference=_eager_gelu,
        workload=_workload(residual=False, approximate=approximate),
        variants=variants,
        sizes=SIZES,
        dtypes=("bfloat16",),
        sources=("kernels/linear",),
    )


SUITES = {
    "linear_gelu": _gelu_suite("linear_gelu", "none"),
    "linear_gelu_tanh": _gelu_suite("linear_gelu_tanh", "tanh"),
    "linear_dropout_add": Suite(
        name="linear_dropout_add",
        summary="dropout(x · weightᵀ + bias) + residual, the mask eager's",
        reference=_masked,
        workload=_workload(residual=True),
        variants=(
            Variant("tilewright", "triton", linear_dropout_add, "the second pass over y"),
            Variant("eager", "torch", _eager_dropout_add, "two more passes over y, and the mask"),
            generated(_eager_dropout_add, note="one more pass over y, where no epilogue is generated"),
            inductor(_eager_dropout_add, unverified="it draws another mask"),
            _BARE,
        ),
        sizes=SIZES,
        dtypes=("bfloat16",),
        sources=("kernels/linear",),
        draws=_draws,
    ),
}
