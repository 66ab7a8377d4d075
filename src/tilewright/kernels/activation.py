"""GELU, SiLU and the gated pairs SwiGLU and GeGLU, forward and backward, each one pass through memory.

    gelu(x)        = x·Φ(x)                            Hendrycks & Gimpel, arXiv:1606.08415
    gelu, "tanh"   = ½x·(1 + tanh(√(2/π)(x + 0.044715x³)))
    silu(x)        = x / (1 + exp(-x))                 the same paper; as swish, arXiv:1710.05941
    swiglu(g, u)   = silu(g)·u,  geglu(g, u) = gelu(g)·u    Shazeer, arXiv:2002.05202

On a CUDA device a kernel is generated for fp32, bf16 and fp16 (arithmetic in fp32) from the formulas in
`operators/own/activation.py`; fp64, and every dtype on a CPU, is computed by PyTorch's own operators. Tensors are read
where they lie; results are contiguous.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tilewright.kernels.arguments import expect_tensors
from tilewright.kernels.registration import define
from tilewright.launch.gradient import Gradient, Input, OutputGrad

KINDS = {"none": "gelu", "tanh": "gelu_tanh"}


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x·Φ(x) for x of any shape and floating dtype; same shape and dtype. `approximate`: "none" (erf) or "tanh".

    Raises TypeError where x is not floating, ValueError for another `approximate`.

    >>> gelu(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.1587,  0.0000,  0.8413])
    """
    return _activation(_floating("gelu", x), _kind(approximate))  # type: ignore[no-any-return]


def silu(x: torch.Tensor) -> torch.Tensor:
    """x·σ(x) for x of any shape and floating dtype; same shape and dtype. Raises TypeError where x is not floating."""
    return _activation(_floating("silu", x), "silu")  # type: ignore[no-any-return]


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate)·up, of one shape and floating dtype.

    Raises TypeError where the dtype is not floating, ValueError where shapes, dtypes or devices differ.

    >>> gate, up = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).chunk(2, dim=-1)
    >>> swiglu(gate, up)
    tensor([[2.1932, 7.0464]])
    """
    return _gated(*_pair("swiglu", gate, up), "silu")  # type: ignore[no-any-return]


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(gate)·up, of one shape and floating dtype; `approximate` as for `gelu`. Raises as `swiglu` and `gelu` do."""
    return _gated(*_pair("geglu", gate, up), _kind(approximate))  # type: ignore[no-any-return]


def _kind(approximate: str) -> str:
    if approximate not in KINDS:
        raise ValueError(f'approximate is "none" or "tanh", not {approximate!r}')
    return KINDS[approximate]


def _floating(name: str, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        expect_tensors(name, x=x)
    if not x.is_floating_point():
        raise TypeError(f"{name} takes floating-point tensors, not {x.dtype}")
    return x


def _pair(name: str, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if not (isinstance(gate, torch.Tensor) and isinstance(up, torch.Tensor)):
        expect_tensors(name, gate=gate, up=up)
    _floating(name, gate)
    if (gate.shape, gate.dtype, gate.device) != (up.shape, up.dtype, up.device):
        raise ValueError(
            f"{name} takes gate and up of one shape, dtype and device, not "
            f"{tuple(gate.shape)} {gate.dtype} on {gate.device} and {tuple(up.shape)} {up.dtype} on {up.device}"
        )
    return gate, up


def formula(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The activation by PyTorch's own operators; `kind` is "none", "gelu", "gelu_tanh" or "silu"."""
    if kind == "none":
        return x
    return F.silu(x) if kind == "silu" else F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def formula_backward(dy: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    """dy · act'(x) by PyTorch's own operators."""
    if kind == "none":
        return dy
    if kind == "silu":
        return torch.ops.aten.silu_backward(dy, x)  # type: ignore[no-any-return]
    return torch.ops.aten.gelu_backward(dy, x, approximate="tanh" if kind == "gelu_tanh" else "none")  # type: ignore[no-any-return]


def _forward(x: torch.Tensor, kind: str) -> torch.Tensor:
    return formula(x, kind).contiguous()


def _backward(dy: torch.Tensor, x: torch.Tensor, kind: str) -> torch.Tensor:
    return formula_backward(dy, x, kind).contiguous()


def _gated_forward(gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
    return (formula(gate, kind) * up).contiguous()


def _gated_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return formula_backward(dy * up, gate, kind).contiguous(), (dy * formula(gate, kind)).contiguous()


def _like(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_activation_backward = define("activation_backward", _backward, lambda dy, x, kind: _like(x))
_gated_activation_backward = define(
    "gated_activation_backward", _gated_backward, lambda dy, gate, up, kind: (_like(gate), _like(up))
)


_activation = define(
    "activation",
    _forward,
    _like,
    gradient=Gradient(_activation_backward, (OutputGrad(0), Input(0), Input(1)), (0, None)),
)
_gated = define(
    "gated_activation",
    _gated_forward,
    _like,
    gradient=Gradient(_gated_activation_backward, (OutputGrad(0), Input(0), Input(1), Input(2)), (0, 1, None)),
)
