"""The gradient of a gradient kernel: none, said clearly rather than silently zero."""

from __future__ import annotations

from typing import Any, NoReturn

from tilewright.kernels.registration import Operator


def no_double_backward(name: str) -> Operator:
    """What `registration.define` takes as the `backward` of an operator that is itself a backward."""

    def refuse(ctx: Any, *gradients: Any) -> NoReturn:
        raise NotImplementedError(
            f"tilewright's {name} has no second derivative; compute that part with PyTorch's operators"
        )

    return refuse
