"""Launches and draws as plain data, noted while somebody listens: what `repeat.py` keeps of a call."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LETTERS = {"i1": "b", "i8": "b", "u8": "B", "i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f", "fp64": "d"}
"""Of `struct`, for Triton's types of parameters."""
WARP = 32


class Launch(NamedTuple):
    """One launch that the driver was asked for."""

    function: int
    """The driver's handle."""
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    letters: str
    """One of `struct` for each parameter; P is an address."""
    values: tuple[float, ...]


class Seed(int):
    """Of a generator, that it gives to each call."""


class Offset(int):
    """Of a generator, where the numbers of one call begin."""


@dataclass
class Heard:
    """What a thread did while somebody listened."""

    launches: list[Launch | None] = field(default_factory=list)
    """In order; None for one that is no plain data."""
    advances: list[int] = field(default_factory=list)
    """How far each draw moved the generator."""


class _Listening(threading.local):
    heard: Heard | None = None


_listening = _Listening()


@contextlib.contextmanager
def heard() -> Iterator[Heard]:
    """This thread's launches by `nvrtc.Kernel` and `launch`, and its draws that say so by `drawn`."""
    before, _listening.heard = _listening.heard, Heard()
    try:
        yield _listening.heard
    finally:
        _listening.heard = before


def listened() -> bool:
    """Whether this thread's launches are to be noted."""
    return _listening.heard is not None


def note(launch: Launch | None) -> None:
    """Tell whoever listens of a launch."""
    if _listening.heard is not None:
        _listening.heard.launches.append(launch)


def drawn(seed: int, offset: int, advance: int) -> tuple[int, int]:
    """Seed and offset as a launch is to be given them, after they were taken from the default generator."""
    if _listening.heard is None:
        return seed, offset
    _listening.heard.advances.append(advance)
    return Seed(seed), Offset(offset)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """`kernel[grid](*arguments, **options)` of a Triton kernel, whose parameters come first and then its constants."""
    if _listening.heard is None:
        kernel[grid](*arguments, **options)
        return
    # Triton takes an integer for one that is nothing else.
    plain = [int(x) if isinstance(x, Seed | Offset) else x for x in arguments]
    note(_plain(kernel.arg_names, kernel[grid](*plain, **options), grid, arguments, options))


def _plain(
    names: Sequence[str], compiled: Any, grid: tuple[int, ...], arguments: Sequence[Any], options: dict[str, Any]
) -> Launch | None:
    """A launch of Triton's, without Triton; None where it takes more than parameters, or was interpreted."""
    if compiled is None:
        return None
    meta = compiled.metadata
    more = meta.global_scratch_size, meta.profile_scratch_size, meta.launch_cooperative_grid, meta.launch_pdl
    kinds = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
    if any(more) or meta.num_ctas != 1 or any(kind[0] != "*" and kind not in LETTERS for kind in kinds.values()):
        return None
    given: dict[str, Any] = dict(zip(names, arguments, strict=False)) | options
    letters = "".join("P" if kind[0] == "*" else LETTERS[kind] for kind in kinds.values())
    values = [given[name].data_ptr() if kind[0] == "*" else given[name] for name, kind in kinds.items()]
    x, y, z = (*grid, 1, 1)[:3]
    # Two areas of Triton's own come last, which these kernels do not have.
    numbers = (*values, 0, 0)
    return Launch(int(compiled.function), (x, y, z), WARP * meta.num_warps, meta.shared, letters + "PP", numbers)


def word(letter: str, value: float) -> int:
    """A parameter in the eight bytes that the driver is given the address of."""
    return int.from_bytes(struct.pack(f"@{letter}", value).ljust(8, b"\0"), "little")
