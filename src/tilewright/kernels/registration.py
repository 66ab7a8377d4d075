"""How a kernel becomes a `torch.library` operator: schema, implementation, fake, autograd, in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("tilewright", "FRAGMENT")
Operator = Callable[..., Any]
IMPLEMENTATIONS: dict[str, Operator] = {}
"""By full name, `tilewright::softmax`: what runs below autograd."""


def define(
    schema: str,
    implementation: Operator,
    fake: Operator,
    *,
    backward: Operator | None = None,
    save: Operator | None = None,
    draws: bool = False,
) -> Operator:
    """Register `schema` (`softmax(Tensor x, int dim) -> Tensor`) and return the callable operator.

    `implementation` runs on every device and decides itself what it can do there; `fake` gives the
    results' shapes, dtypes and strides from fake tensors; `backward(ctx, *grads)` and
    `save(ctx, inputs, output)` are as in `torch.library.register_autograd`, and themselves call
    operators defined here, so that `torch.compile` and double tracing see through them. `draws`: it takes
    random numbers from PyTorch's generator, so that no two calls may become one and none be dropped.
    """
    name = schema.split("(", 1)[0].strip()
    full = f"tilewright::{name}"
    tags = (torch.Tag.pt2_compliant_tag, *((torch.Tag.nondeterministic_seeded,) if draws else ()))
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    IMPLEMENTATIONS[full] = implementation
    torch.library.register_fake(full, fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(full, backward, setup_context=save, lib=_LIBRARY)
    operator: Operator = getattr(torch.ops.tilewright, name).default
    return operator
