"""Triton's interpreter for a student's kernel: loops up to an argument, libdevice, and an error for a stray access.

On a GPU an access outside of a tensor may go unnoticed; in the interpreter it destroys the memory of the process.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
import triton.language as tl

from tilewright.emit import interpreted_libdevice

from .stray import Access, StrayAccessError


def install() -> None:
    """Patch the interpreter of this process, in which Triton was imported under TRITON_INTERPRET=1."""
    from triton.runtime import interpreter

    interpreted_libdevice.install()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, arguments = builder.create_masked_load, builder.create_masked_store, executor._init_args_hst
    convert, bfloat16 = interpreter._convert_float, (tl.float32, tl.bfloat16)
    extents: list[tuple[int, int]] = []

    def to_nearest(values: Any, *kinds: Any) -> Any:
        """Triton's own cuts the low bits off, whose error is twice that of a GPU."""
        if kinds[:2] != bfloat16:
            return convert(values, *kinds)
        return torch.tensor(values).bfloat16().view(torch.uint16).numpy()

    def arguments_on_host(self: Any, positional: Sequence[Any], named: dict[str, Any]) -> Any:
        on_host = arguments(self, positional, named)
        extents[:] = _extents((*on_host[0], *on_host[1].values()))
        return on_host

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask, extents, "reads")
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask, extents, "writes")
        return store(self, pointers, value, mask, *rest)

    # An overflow of the student's is named by the element that it makes wrong.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")
    interpreter._convert_float = to_nearest
    executor._init_args_hst = arguments_on_host
    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store


def _extents(arguments: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """First address, and the one behind the last, of the storage of each tensor and descriptor."""
    for argument in arguments:
        tensor = getattr(argument, "base", argument)
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _check(pointers: Any, mask: Any, extents: Sequence[tuple[int, int]], does: Access) -> None:
    addresses = np.asarray(pointers.data).astype(np.int64)
    touched = addresses[np.broadcast_to(np.asarray(mask.data).astype(bool), addresses.shape)]
    inside = np.zeros(touched.shape, dtype=bool)
    for first, end in extents:
        inside |= (first <= touched) & (touched < end)
    if not inside.all():
        raise StrayAccessError(_line(), does, int(np.count_nonzero(~inside)))


def _line() -> int:
    """The line of the kernel that runs: the innermost frame that is neither here nor in Triton."""
    frame: FrameType | None = sys._getframe()
    while frame and (frame.f_code.co_filename == __file__ or "/triton/" in frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_lineno if frame else 0
