"""What a call of an operator allocated and launched, as plain data that `repeat.cpp` does again.

An operator that says so (`registration.define`) depends on its arguments' shapes, strides, dtypes and devices, on where
they begin within a line of 128 bytes, and on its options, and on nothing else: not on the values in its tensors. So one
call stands for all of its kind, and only addresses differ, and what it draws. It is watched twice over: PyTorch's
dispatcher shows what is allocated, and whatever else is called there makes the call one that cannot be repeated;
`launches.py` shows what is launched, and an address that is of no argument and of nothing allocated does so too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.kernels.launches import Heard, Launch, Offset, Seed, heard, word
from tilewright.kernels.nvrtc import cuda_function, primary_context, stream_function
from tilewright.launch.extension import Extension
from tilewright.records.errors import CompilerError, warn_once

EXTENSION = Extension(Path(__file__).parent / "repeat.cpp", "eager calls cost the host more in Python")
LINE = 128
"""Bytes, within which it matters where a tensor begins."""
NUMBER, SEED, OFFSET = -1, -2, -3
"""In place of a tensor, what a parameter is."""
_ATEN = torch.ops.aten
_ALLOCATE = (
    _ATEN.empty.memory_format, _ATEN.empty_strided.default, _ATEN.empty_like.default, _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
)  # fmt: skip
_VIEW = _ATEN._unsafe_view.default
"""Which does not say so."""


class Chain(NamedTuple):
    """What `keep` of repeat.cpp takes; tensors are counted from the arguments' first on, then those made."""

    driver: tuple[int, ...]
    """cuLaunchKernel, cuCtxSetCurrent, cuStreamIsCapturing, PyTorch's current stream, and the device's context."""
    single: bool
    """Whether the result is a tensor, and no tuple."""
    results: int
    """Of those made, the first."""
    made: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int], ...]
    """Sizes, strides, dtype, and the bytes from a line's begin."""
    launches: tuple[tuple[int, tuple[int, int, int], int, int, tuple[tuple[int, int], ...]], ...]
    """Function, grid, threads, shared bytes, and each parameter: a tensor and the bytes from its begin; or `NUMBER` and
    what lies in the parameter's memory; or `SEED` or `OFFSET`."""
    advance: int
    """What the call draws from the device's default generator, in steps of its offset; 0: nothing."""


class _Allocations(TorchDispatchMode):
    """Keeps what is allocated, so that no two of them have one address."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[torch.Tensor] = []
        self.alone = True
        """Whether nothing else was called than allocations and views."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATE:
            self.made.append(result)
        elif not func.is_view and func is not _VIEW:
            self.alone = False
        return result


def watched(run: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, Chain | None]:
    """The result of `run(*arguments)`, and what repeats it, if anything can."""
    with heard() as noted, _Allocations() as allocations:
        result = run(*arguments)
    given = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    if not allocations.alone:
        return result, None
    try:
        return result, _chain(given, allocations.made, result, noted)
    except CompilerError as error:
        warn_once(f"eager calls cost the host more: {error}")
        return result, None


def _chain(given: Sequence[torch.Tensor], made: Sequence[torch.Tensor], result: Any, noted: Heard) -> Chain | None:
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    order = [_of(made, each) for each in results]
    if None in order or len(set(order)) < len(order) or any(x.device != given[0].device for x in made):
        return None
    rest = [x for i, x in enumerate(made) if i not in order]
    memory = [*given, *results, *rest]
    sent = []
    for launch in noted.launches:
        parameters = _parameters(launch, memory, len(given)) if launch else None
        if launch is None or parameters is None:
            return None
        sent.append((launch.function, launch.grid, launch.threads, launch.shared_bytes, tuple(parameters)))
    laid = [(tuple(x.shape), x.stride(), x.dtype, x.data_ptr() % LINE) for x in memory[len(given) :]]
    device = given[0].device.index
    # Each of both reaches a launch as it was taken, or something was computed from it that nobody can repeat.
    taken = {place for *_, parameters in sent for place, _ in parameters if place in (SEED, OFFSET)}
    if len(noted.advances) > 1 or len(taken) != 2 * len(noted.advances):
        return None
    single = isinstance(result, torch.Tensor)
    return Chain(driver_of(device), single, len(results), tuple(laid), tuple(sent), sum(noted.advances))


def _parameters(launch: Launch, memory: Sequence[torch.Tensor], given: int) -> tuple[tuple[int, int], ...] | None:
    """Of one launch; None if there is an address of nothing known."""
    found = []
    for letter, value in zip(launch.letters, launch.values, strict=True):
        if letter == "P":
            place = _place(memory, given, int(value))
        elif isinstance(value, Seed | Offset):
            place = SEED if isinstance(value, Seed) else OFFSET, 0
        else:
            place = NUMBER, word(letter, value)
        if place is None:
            return None
        found.append(place)
    return tuple(found)


def _of(made: Sequence[torch.Tensor], result: torch.Tensor) -> int | None:
    """Which allocation a result is, whole, if it is one."""
    for i, x in enumerate(made):
        if x.untyped_storage() is result.untyped_storage():
            whole = x.numel() == result.numel() and result.storage_offset() == 0 and x.dtype == result.dtype
            return i if whole else None
    return None


def _place(memory: Sequence[torch.Tensor], given: int, address: int) -> tuple[int, int] | None:
    """The tensor that begins at an address, or that was made and holds it, and the bytes from its begin."""
    if address == 0:
        return NUMBER, 0
    for i, x in enumerate(memory):
        added = address - x.data_ptr()
        if x.numel() and (added == 0 or (i >= given and 0 < added < x.untyped_storage().nbytes())):
            return i, added
    return None


@functools.cache
def driver_of(device: int) -> tuple[int, ...]:
    """As in `Chain`. Raises CompilerError where a function is missing."""
    functions = (cuda_function(name) for name in ("cuLaunchKernel", "cuCtxSetCurrent", "cuStreamIsCapturing"))
    return *functions, stream_function(), primary_context(device)
