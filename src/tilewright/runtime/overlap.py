"""Calls whose arguments share memory that the program writes: PyTorch runs them.

    run(x[:-1], x[1:])      # run adds 1 to its first argument in place, which changes the second one

A captured graph treats its inputs as separate tensors. Dynamo calls it again with tensors of the same shapes wherever
they lie, so each call has to look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.launch.executor import EXTENSION
from tilewright.pytorch.state import has_storage, share_elements
from tilewright.records.recipe import is_expanded


class UnlessOverlapping:
    """Runs `compiled` for calls that give each written element once, and the result of `eager` for others."""

    def __init__(
        self, compiled: Callable[..., Any], eager: Callable[[], Callable[..., Any]], written: Sequence[bool]
    ) -> None:
        self.compiled = compiled
        self.eager = eager
        self.written = tuple(written)

    def __call__(self, *args: Any) -> Any:
        native = EXTENSION.found
        if (native is None or native.meet(args, self.written)) and overlapping(args, self.written):
            return self.eager()(*args)
        return self.compiled(*args)


def overlapping(args: Sequence[Any], written: Sequence[bool]) -> bool:
    """Whether an element of a written tensor is in memory also another one, of the same tensor or of another."""
    ranges = [
        (*_range(x), is_written, x)
        for x, is_written in zip(args, written, strict=True)
        if isinstance(x, torch.Tensor) and x.numel() and has_storage(x)
    ]
    ranges.sort(key=lambda found: found[0])
    for place, (_, end, is_written, x) in enumerate(ranges):
        if is_written and (overlaps(x) or is_expanded(x.shape, x.stride())):
            return True
        for following in range(place + 1, len(ranges)):
            begin, _, is_written_too, y = ranges[following]
            if begin >= end:
                break
            if (is_written or is_written_too) and share_elements(x, y):
                return True
    return False


def overlaps(x: torch.Tensor) -> bool:
    """Whether elements of x share memory by other strides than 0, as in a result of `unfold`."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1 and s):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _range(x: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first element and behind the last one."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    begin = x.untyped_storage().data_ptr() + int(x.storage_offset()) * x.itemsize
    return begin, begin + (last + 1) * x.itemsize
