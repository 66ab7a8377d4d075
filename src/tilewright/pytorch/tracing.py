"""PyTorch's tracer of what runs: `make_fx`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx


def traced(function: Callable[..., Sequence[torch.Tensor]], arguments: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The ATen graph of what `function` runs for these tensors, whose values may decide it."""
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    # Without a context it makes a mode for the metadata of every single result, half of the time of a trace. Operators
    # that trace functions of their own (FlexAttention's backward) take the mode, and give it tensors of the run.
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True, allow_non_fake_inputs=True))):
        graph: fx.GraphModule = make_fx(function, _error_on_data_dependent_ops=False)(*arguments)
    return graph
