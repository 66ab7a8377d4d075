"""Builds the C++ executor (`native/`) in the background at run time, and converts recipes for it."""

from __future__ import annotations

import struct
from pathlib import Path
from types import ModuleType
from typing import Any

from tilewright.launch import driver
from tilewright.launch.extension import Extension
from tilewright.records.recipe import (
    Argument,
    Copy,
    Fill,
    Launch,
    Layout,
    Number,
    Offset,
    Pointer,
    Recipe,
    Seed,
    Structure,
    TensorMap,
)

EXTENSION = Extension(
    Path(__file__).parent / "native" / "executor.cpp", "compiled models and eager calls cost the host more in Python"
)
POINTER, NUMBER, SEED, OFFSET, MAP, STRUCTURE = range(6)
"""Kinds of arguments, as in native/recipe.h."""
LAUNCH, COPY, FILL = range(3)
"""Kinds of actions, as in native/recipe.h."""


def native_recipe(module: ModuleType, recipe: Recipe) -> Any:
    """The recipe as an object of the executor. Raises CompilerError if a function of the driver is missing."""
    maps: list[tuple[Any, ...]] = []
    structures: list[tuple[Any, ...]] = []
    actions = [_action(action, maps, structures) for action in recipe.actions]
    table = driver.table(recipe.device.index or 0) if any(isinstance(a, Launch) for a in recipe.actions) else (0,) * 6
    buffers = [native_layout(layout) for layout in recipe.buffers]
    return module.recipe(
        (
            recipe.name, recipe.device, table, recipe.residues, recipe.modulus, buffers, recipe.results, actions,
            maps, structures, recipe.advance, recipe.keep,
        )
    )  # fmt: skip


def native_layout(layout: Layout) -> tuple[Any, ...]:
    return layout.shape, layout.strides, layout.dtype, layout.device, layout.is_unresolved


def _action(
    action: Launch | Copy | Fill, maps: list[tuple[Any, ...]], structures: list[tuple[Any, ...]]
) -> tuple[Any, ...]:
    if isinstance(action, Copy):
        return COPY, action.target, action.source
    if isinstance(action, Fill):
        part = None if action.part is None else (action.part.shape, action.part.strides, action.offset)
        return FILL, action.target, action.value, part
    kernel = action.kernel
    arguments = [_argument(argument, maps, structures) for argument in action.arguments]
    return LAUNCH, int(kernel.function), action.grid, kernel.threads, kernel.shared_bytes, arguments


def _argument(
    argument: Argument, maps: list[tuple[Any, ...]], structures: list[tuple[Any, ...]]
) -> tuple[int, int, int]:
    """Kind, number of the tensor, value."""
    match argument:
        case Pointer(tensor, offset):
            return POINTER, tensor, offset
        case Number(letter, value):
            return NUMBER, 0, word(letter, value)
        case Seed():
            return SEED, 0, 0
        case Offset():
            return OFFSET, 0, 0
        case TensorMap():
            lies = argument.sizes, argument.strides, argument.box
            maps.append((argument.dtype, argument.swizzle, argument.promotion, *lies))
            return MAP, argument.tensor, len(maps) - 1
        case Structure(data, patches):
            structures.append((data, [(at, *_argument(patch, maps, structures)) for at, patch in patches]))
            return STRUCTURE, 0, len(structures) - 1


def word(letter: str, value: float) -> int:
    """The eight bytes that hold a number of this `struct` format, as an integer; the driver gets their address."""
    return int.from_bytes(struct.pack(f"@{letter}", value).ljust(8, b"\0"), "little")
