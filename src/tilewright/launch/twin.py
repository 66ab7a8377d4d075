"""The executor's Python twin: performs recipes while the executor is being built, or if there is no C++ compiler."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tilewright.launch import driver
from tilewright.launch.builder import UncompiledKernel
from tilewright.launch.executor import word
from tilewright.records.errors import CompilerError
from tilewright.records.recipe import (
    Argument,
    Copy,
    Fill,
    Launch,
    Number,
    Offset,
    Pointer,
    Recipe,
    Seed,
    Structure,
    TensorMap,
)

MAP_BYTES, MAP_ALIGNMENT = 128, 64


def perform(recipe: Recipe, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The results of `recipe` for `inputs`, on the current stream. The recipe's device must be the current one."""
    tensors = list(inputs)
    for layout in recipe.buffers:
        tensors.append(torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=layout.device))
    seed, offset = _draw(recipe) if recipe.advance else (0, 0)
    for action in recipe.actions:
        if isinstance(action, Copy):
            tensors[action.target].copy_(tensors[action.source])
        elif isinstance(action, Fill):
            _part(tensors[action.target], action).fill_(action.value)
        elif isinstance(action.kernel, UncompiledKernel):
            values = [_for_triton(argument, tensors, seed, offset) for argument in action.arguments]
            for place, descriptor in action.kernel.described.items():
                values[place] = replace(descriptor, base=values[place])
            action.kernel.kernel[action.grid](*values, **action.kernel.options)
        else:
            launch(recipe.name, recipe.device.index or 0, action, [x.data_ptr() for x in tensors], seed, offset)
    return tuple(tensors[len(inputs) + number] for number in recipe.results)


def _part(x: torch.Tensor, fill: Fill) -> torch.Tensor:
    if fill.part is None:
        return x
    return x.as_strided(fill.part.shape, fill.part.strides, x.storage_offset() + fill.offset)


def _for_triton(argument: Argument, tensors: Sequence[torch.Tensor], seed: int, offset: int) -> Any:
    """An argument for Triton's launcher: a tensor, a number, or None for a null pointer."""
    match argument:
        case Pointer(tensor, added):
            x = tensors[tensor]
            elements = x.storage_offset() + added // x.element_size()
            return x.as_strided(x.shape, x.stride(), elements) if added else x
        case Number("P", _):
            return None
    return _number(argument, (), seed, offset)


def _number(argument: Argument, addresses: Sequence[int], seed: int, offset: int) -> float:
    """The address or number that an argument stands for."""
    match argument:
        case Pointer(tensor, added):
            return addresses[tensor] + added
        case Number(_, value):
            return value
        case Seed():
            return seed
        case Offset():
            return offset
    raise TypeError(f"{argument} is no number")


def _draw(recipe: Recipe) -> tuple[int, int]:
    """Seed (as a signed number, for Triton) and offset of the device's default generator, which it advances."""
    generator = torch.cuda.default_generators[recipe.device.index or 0]
    offset: int = generator.get_offset()
    generator.set_offset(offset + recipe.advance)
    seed = generator.initial_seed()
    return seed - 2**64 if seed >= 2**63 else seed, offset


def launch(
    name: str, device: int, action: Launch, addresses: Sequence[int] = (), seed: int = 0, offset: int = 0
) -> None:
    """Launch on the current stream of CUDA device `device`, for tensors at these addresses.

    Raises CompilerError, which begins with `name`, if the driver refuses.
    """
    calls = _calls(device)
    # Encoding a tensor map and launching from autograd's threads both need the device's context.
    calls.make_current()
    values = [_value(calls, argument, addresses, seed, offset) for argument in action.arguments]
    places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value, _ in values))
    kernel = action.kernel
    status = calls.launch(
        int(kernel.function), *action.grid, kernel.threads, 1, 1, kernel.shared_bytes, calls.stream(), places, None
    )
    if status:
        asked = f"{action.grid} blocks of {kernel.threads} threads with {kernel.shared_bytes} bytes of shared memory"
        raise CompilerError(f"{name}: the driver refuses a launch: CUDA error {status} ({asked})")


def _value(calls: _Calls, argument: Any, addresses: Sequence[int], seed: int, offset: int) -> tuple[Any, Any]:
    """A parameter as the driver reads it, and an object that keeps its memory alive."""
    match argument:
        case Pointer(tensor, added):
            return ctypes.c_uint64(addresses[tensor] + added), None
        case Number(letter, value):
            return ctypes.c_uint64(word(letter, value)), None
        case Seed():
            return ctypes.c_uint64(seed), None
        case Offset():
            return ctypes.c_uint64(offset), None
        case Structure(data, patches):
            buffer = ctypes.create_string_buffer(data, len(data))
            for at, patch in patches:
                ctypes.c_uint64.from_buffer(buffer, at).value = int(_number(patch, addresses, seed, offset))
            return buffer, None
        case TensorMap():
            room = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
            start = -ctypes.addressof(room) % MAP_ALIGNMENT
            encoded = (ctypes.c_char * MAP_BYTES).from_buffer(room, start)
            calls.encode(argument, addresses[argument.tensor], ctypes.addressof(encoded))
            return encoded, room
    raise TypeError(f"{argument} is no argument of a launch")


class _Calls:
    """The driver's functions for one device, called through ctypes."""

    def __init__(self, device: int) -> None:
        launch, encode, make_current, _, current_stream, context = driver.table(device)
        self.device, self.context = device, context
        word = ctypes.c_uint
        self.launch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *[word] * 7, *[ctypes.c_void_p] * 3)(launch)
        self._encode = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.c_int, word, *[ctypes.c_void_p] * 5, *[ctypes.c_int] * 4
        )(encode)
        self._make_current = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(make_current)
        self._stream = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))(current_stream)

    def make_current(self) -> None:
        self._make_current(self.context)

    def stream(self) -> int | None:
        """PyTorch's current stream."""
        found = ctypes.c_void_p()
        if self._stream(self.device, ctypes.byref(found)):
            raise CompilerError("PyTorch gives no current stream")
        return found.value

    def encode(self, of: TensorMap, address: int, to: int) -> None:
        rank = len(of.sizes)
        sizes, strides = (ctypes.c_uint64 * rank)(*of.sizes), (ctypes.c_uint64 * rank)(*of.strides)
        box, steps = (ctypes.c_uint32 * rank)(*of.box), (ctypes.c_uint32 * rank)(*[1] * rank)
        status = self._encode(to, of.dtype, rank, address, sizes, strides, box, steps, 0, of.swizzle, of.promotion, 0)
        if status:
            raise CompilerError(f"the driver refuses a tensor map of {of.sizes}: CUDA error {status}")


@functools.cache
def _calls(device: int) -> _Calls:
    return _Calls(device)
