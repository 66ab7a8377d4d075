"""tilewright's kernels as functions: PyTorch operators with fake and autograd, on any device.

Each is loaded when it is first used. On a GPU the kernel that suits shape and dtype runs; elsewhere PyTorch's
own operators compute the formula. What a call costs the host is in docs/kernels.md, "Called eagerly".

>>> import torch
>>> from tilewright import functional
>>> functional.softmax(torch.zeros(2, 4))
tensor([[0.2500, 0.2500, 0.2500, 0.2500],
        [0.2500, 0.2500, 0.2500, 0.2500]])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.kernels.activation import geglu, gelu, silu, swiglu
    from tilewright.kernels.attention import attention
    from tilewright.kernels.attention.window import window_attention
    from tilewright.kernels.cross_entropy import cross_entropy
    from tilewright.kernels.dropout_add import dropout_add
    from tilewright.kernels.linear import linear_dropout_add, linear_gelu
    from tilewright.kernels.linear_cross_entropy import linear_cross_entropy
    from tilewright.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
    from tilewright.kernels.softmax import log_softmax, softmax
    from tilewright.kernels.weighted_sum import weighted_sum

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "cross_entropy",
    "dropout_add",
    "geglu",
    "gelu",
    "layer_norm",
    "linear_cross_entropy",
    "linear_dropout_add",
    "linear_gelu",
    "log_softmax",
    "rms_norm",
    "silu",
    "softmax",
    "swiglu",
    "weighted_sum",
    "window_attention",
]

_FOLDERS = {
    "add_layer_norm": "norm",
    "add_rms_norm": "norm",
    "geglu": "activation",
    "gelu": "activation",
    "layer_norm": "norm",
    "linear_dropout_add": "linear",
    "linear_gelu": "linear",
    "log_softmax": "softmax",
    "rms_norm": "norm",
    "silu": "activation",
    "swiglu": "activation",
    "window_attention": "attention.window",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = globals()[name] = getattr(import_module(f"tilewright.kernels.{_FOLDERS.get(name, name)}"), name)
    return found


def __dir__() -> list[str]:
    return list(__all__)
