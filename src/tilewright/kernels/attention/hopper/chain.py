"""Launches of one call as plain data: what is the same in every call lies ready, and what is not is filled in.

A call brings its values: addresses of tensors, and strides where those may differ from call to call. Where they go
among the parameters, and which tensor maps are encoded from them, is known once for all. `attention.cpp` reads the same
data without Python; `Chain.run` serves as long as that is not built, and where it cannot be.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tilewright.kernels.attention.hopper.launch import MAP_ALIGNMENT, MAP_BYTES, RANK, Tensor
from tilewright.kernels.nvrtc import Kernel, make_current

MOST_BYTES, MOST_PATCHES, MOST_MAPS, MOST_PARAMETERS, MOST_LAUNCHES = 2048, 48, 8, 64, 3
POINTER_BYTES = 8


class At(NamedTuple):
    """A parameter of 64 bits: a value of the call, by its number, and what is added to it."""

    value: int
    added: int = 0


class Map(NamedTuple):
    """A tensor map, of the operand at the address that is value number `value`."""

    tensor: Tensor
    value: int
    steps: int | None = None
    """The first of three values that are the operand's strides in elements; None: those that `tensor` has."""


class Block(NamedTuple):
    """A structure passed by value, and what the call sets at some of its offsets."""

    data: bytes
    patches: Mapping[int, At]


Parameter = float | At | Map | Block


class Launch(NamedTuple):
    """`signature` has one letter of Python's `struct` for each parameter that is a number or an `At`, in order."""

    kernel: Kernel
    grid: tuple[int, int, int]
    signature: str
    parameters: Sequence[Parameter]


class _Launch(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_int32 * 3),
        *((name, ctypes.c_int32) for name in ("threads", "shared_bytes", "first")),
    )


class _Patch(ctypes.Structure):
    _fields_ = (("at", ctypes.c_int32), ("value", ctypes.c_int32), ("added", ctypes.c_int64))


class _Map(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("at", "value", "steps", "kind")),
        ("box", ctypes.c_uint32 * RANK),
        ("sizes", ctypes.c_uint64 * RANK),
        ("nbytes", ctypes.c_uint64 * (RANK - 1)),
    )


class Layout(ctypes.Structure):
    """`Chain` of attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("nbytes", "patches", "maps", "parameters", "launches", "unused")),
        ("patch", _Patch * MOST_PATCHES),
        ("map", _Map * MOST_MAPS),
        ("parameter", ctypes.c_int32 * MOST_PARAMETERS),
        ("launch", _Launch * MOST_LAUNCHES),
        ("image", ctypes.c_uint8 * MOST_BYTES),
    )


class Chain:
    """Launches one after another, on one stream of one device."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self.layout = Layout()
        self._launches: list[tuple[Kernel, tuple[int, int, int], int]] = []
        self._maps: list[tuple[int, Map]] = []
        self._threads = threading.local()
        count = sum(isinstance(p, Map) for launch in launches for p in launch.parameters)
        # Maps come first, where all are aligned as the driver wants them.
        self._image = bytearray(MAP_BYTES * count)
        for launch in launches:
            made = self.layout.launch[self.layout.launches]
            made.function, made.grid = int(launch.kernel.function), launch.grid
            made.threads, made.shared_bytes = launch.kernel.threads, launch.kernel.shared_bytes
            made.first = self.layout.parameters
            self._launches.append((launch.kernel, launch.grid, self.layout.parameters * POINTER_BYTES))
            letters = iter(launch.signature)
            for parameter in launch.parameters:
                self.layout.parameter[self.layout.parameters] = self._add(parameter, letters)
                self.layout.parameters += 1
            self.layout.launches += 1
        self.layout.nbytes = len(self._image)
        if len(self._image) > MOST_BYTES:
            raise ValueError(f"parameters of {len(self._image)} bytes, more than {MOST_BYTES}")
        ctypes.memmove(self.layout.image, bytes(self._image), len(self._image))

    def run(self, values: Sequence[int], stream: int) -> None:
        """Launch with the values of a call on a stream's handle; the device is the current one."""
        try:
            _, start, pointers, patches, encoded = self._threads.kept
        except AttributeError:
            _, start, pointers, patches, encoded = self._threads.kept = self._copy()
        for number, value, added in patches:
            number.value = values[value] + added
        for at, operand in self._maps:
            steps = () if operand.steps is None else values[operand.steps : operand.steps + RANK - 1]
            asked = values[operand.value], steps
            if encoded.get(at) != asked:
                tensor = operand.tensor.laid(*steps) if steps else operand.tensor
                tensor.encode(start + at, values[operand.value])
                encoded[at] = asked
        for kernel, grid, first in self._launches:
            kernel.launch(*grid, stream, ctypes.addressof(pointers) + first)

    def _add(self, parameter: Parameter, letters: Any) -> int:
        """Where among the parameters' bytes it lies."""
        if isinstance(parameter, Map):
            return self._add_map(parameter)
        if isinstance(parameter, Block):
            data, patches = parameter
        else:
            letter = next(letters)
            is_set = isinstance(parameter, At)
            data = struct.pack(letter, 0 if is_set else parameter)
            patches = {0: parameter} if isinstance(parameter, At) else {}
        at = -(-len(self._image) // POINTER_BYTES) * POINTER_BYTES
        self._image.extend(bytes(at - len(self._image)) + data)
        for offset, patch in patches.items():
            self.layout.patch[self.layout.patches] = _Patch(at + offset, patch.value, patch.added)
            self.layout.patches += 1
        return at

    def _add_map(self, operand: Map) -> int:
        at = MAP_BYTES * len(self._maps)
        self._maps.append((at, operand))
        tensor, steps = operand.tensor, -1 if operand.steps is None else operand.steps
        described = _Map(at, operand.value, steps, tensor.kind, tensor.box, tensor.sizes, tensor.nbytes)
        self.layout.map[self.layout.maps] = described
        self.layout.maps += 1
        return at

    def _copy(self) -> tuple[Any, int, Any, list[tuple[Any, int, int]], dict[int, object]]:
        """A thread's own parameters, where they begin, the array of their addresses, what a call sets, and which maps
        are encoded already: none."""
        # Autograd's threads have no context at first, and the driver dies of a tensor map that is encoded without one.
        make_current(self._launches[0][0].device)
        room = ctypes.create_string_buffer(self.layout.nbytes + MAP_ALIGNMENT)
        start = -(-ctypes.addressof(room) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        ctypes.memmove(start, self.layout.image, self.layout.nbytes)
        places = [start + at for at in self.layout.parameter[: self.layout.parameters]]
        pointers = (ctypes.c_void_p * len(places))(*places)
        patches = self.layout.patch[: self.layout.patches]
        numbers = [(ctypes.c_uint64.from_address(start + p.at), p.value, p.added) for p in patches]
        return room, start, pointers, numbers, {}
