"""A CUDA driver whose kernels are Python functions on host memory: the one fake that the executor is tested on."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

STREAM, CONTEXT, INVALID_CONTEXT, REFUSED = 99, 77, 201, 700
_Launched = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3)
_Encoded = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, *[ctypes.c_void_p] * 5, *[ctypes.c_int] * 4
)
_Switched = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_Captured = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
_Asked = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
Body = Callable[..., None]
"""Called with the address of each parameter's memory."""


@dataclass(frozen=True)
class FakeKernel:
    """The attributes of a kernel that `records.recipe.Launch` uses."""

    name: str
    function: int
    threads: int = 128
    shared_bytes: int = 0
    signature: str = ""
    """One letter of `struct` for each parameter, which a builder asks for."""


class FakeDriver:
    """`launches` are (kernel, grid, threads, shared bytes) of every launch that was accepted."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[int, int, int], int, int]] = []
        self.refusals: list[int] = []
        """Statuses that the next launches return in place of success."""
        self.contexts: list[int] = []
        self.maps: list[tuple[int, ...]] = []
        """Dtype, address, sizes, strides and box of each encoded tensor map."""
        self.is_capturing = False
        self._bodies: dict[int, tuple[str, int, Body]] = {}
        entries = (
            _Launched(self._launch), _Encoded(self._encode), _Switched(self._switch), _Captured(self._capture),
            _Asked(self._stream),
        )  # fmt: skip
        self._entries = entries
        self.table = (*(ctypes.cast(entry, ctypes.c_void_p).value or 0 for entry in entries), CONTEXT)

    def kernel(
        self, name: str, parameters: int | str, body: Body, *, threads: int = 128, shared_bytes: int = 0,
        others: int = 0,
    ) -> FakeKernel:  # fmt: skip
        """A kernel of so many pointers, or parameters by a signature, and other ones: tensor maps, structures."""
        signature = parameters if isinstance(parameters, str) else "P" * parameters
        function = len(self._bodies) + 1
        self._bodies[function] = name, len(signature) + others, body
        return FakeKernel(name, function, threads, shared_bytes, signature)

    def _launch(self, function: int, *rest: Any) -> int:
        *sizes, stream, parameters, extra = rest
        if self.refusals:
            return self.refusals.pop(0)
        name, count, body = self._bodies[function]
        x, y, z, threads, _, _, shared = sizes
        if stream != STREAM or extra:
            return 1
        self.launches.append((name, (x, y, z), threads, shared))
        body(*(ctypes.c_uint64 * count).from_address(parameters))
        return 0

    def _encode(self, to: int, dtype: int, rank: int, address: int, *rest: Any) -> int:
        sizes, strides, box = (
            tuple((kind * n).from_address(at))
            for kind, n, at in zip(
                (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32), (rank, rank - 1, rank), rest, strict=False
            )
        )
        self.maps.append((dtype, address, sizes, strides, box))
        ctypes.memset(to, len(self.maps), 128)
        return 0

    def _switch(self, context: int) -> int:
        self.contexts.append(context)
        return 0

    def _capture(self, stream: int, to: Any) -> int:
        to[0] = int(self.is_capturing)
        return 0

    def _stream(self, device: int, to: Any) -> int:
        to[0] = STREAM
        return 0


def word_at(place: int) -> int:
    """The eight bytes of a parameter."""
    return ctypes.c_uint64.from_address(place).value


def floats_at(place: int, count: int) -> torch.Tensor:
    """The fp32 numbers that a parameter points to."""
    return torch.frombuffer((ctypes.c_float * count).from_address(word_at(place)), dtype=torch.float32)


def adder(count: int) -> Body:
    """z = x + y of `count` numbers; parameters x, y, z."""

    def add(x: int, y: int, z: int) -> None:
        rows = [(ctypes.c_float * count).from_address(word_at(place)) for place in (x, y, z)]
        for i in range(count):
            rows[2][i] = rows[0][i] + rows[1][i]

    return add
