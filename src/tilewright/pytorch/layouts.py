"""The memory formats that PyTorch's kernels choose by their operands."""

from __future__ import annotations

import torch


def suggested_format(x: torch.Tensor) -> torch.memory_format:
    """The format of a result that follows `x`: channels-last if its strides fall in that order, gaps or not."""
    return torch._prims_common.suggest_memory_format(x)
