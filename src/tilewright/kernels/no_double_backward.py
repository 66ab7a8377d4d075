"""Operators that are gradients themselves: their own gradient raises instead of being zero."""

from __future__ import annotations

from typing import Any, NoReturn

from tilewright.kernels.registration import Operator


def no_double_backward(name: str) -> Operator:
    """The `backward` for `registration.define` of an operator that is a gradient: it raises NotImplementedError."""

    def refuse(ctx: Any, *gradients: Any) -> NoReturn:
        raise NotImplementedError(
            f"tilewright's {name} has no second derivative; compute that part with PyTorch's operators"
        )

    return refuse
