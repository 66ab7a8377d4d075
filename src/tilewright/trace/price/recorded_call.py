"""Operator calls as PyTorch's profiler writes them into a trace: names, shapes, strides, dtypes, small values."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeGuard

ITEMSIZE: Mapping[str, tuple[int, str]] = {
    "float": (4, "float32"),
    "double": (8, "float64"),
    "c10::BFloat16": (2, "bfloat16"),
    "c10::Half": (2, "float16"),
    "long int": (8, "int64"),
    "long": (8, "int64"),
    "int": (4, "int32"),
    "short int": (2, "int16"),
    "signed char": (1, "int8"),
    "unsigned char": (1, "uint8"),
    "bool": (1, "bool"),
    "c10::Float8_e4m3fn": (1, "float8_e4m3fn"),
    "c10::Float8_e5m2": (1, "float8_e5m2"),
}
"""Bytes of an element and PyTorch's name, by the profiler's name of a dtype."""
_MOST_DIMENSIONS = 64
"""PyTorch has no tensors of more; a file may claim any number, and their product would take for ever."""


@dataclass(frozen=True)
class Tensor:
    """An operand or a result: its shape, the elements of storage that it addresses, and its dtype."""

    shape: tuple[int, ...]
    own: int
    itemsize: int
    dtype: str

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.own * self.itemsize


@dataclass(frozen=True)
class PositionalCall:
    """One recorded call. An operand is a tensor, a list of tensors, or text as the profiler wrote it."""

    name: str
    """Without its namespace: `native_layer_norm`."""
    operands: tuple[Tensor | tuple[Tensor, ...] | str, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [operand for operand in self.operands if isinstance(operand, Tensor)]

    @property
    def lists(self) -> list[tuple[Tensor, ...]]:
        return [operand for operand in self.operands if isinstance(operand, tuple)]

    def value(self, index: int) -> object:
        """A number, list, or bool among the operands; None if it is absent or of another kind."""
        text = self.operands[index] if index < len(self.operands) else ""
        if not isinstance(text, str) or not text:
            return None
        try:
            found: object = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
        return found


def read_call(name: str, args: Mapping[str, object], listed_dtype: str = "float") -> PositionalCall | None:
    """The call that the profiler's `args` describe; None where it recorded no shapes or something odd.

    The profiler does not tell the dtype of a list of tensors: `listed_dtype` is taken.
    """
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list) or len(dims) != len(types):
        return None
    strides, values = args.get("Input Strides"), args.get("Concrete Inputs")
    strides = strides if isinstance(strides, list) and len(strides) == len(dims) else [None] * len(dims)
    values = values if isinstance(values, list) and len(values) == len(dims) else [""] * len(dims)
    operands: list[Tensor | tuple[Tensor, ...] | str] = []
    for shape, kind, steps, value in zip(dims, types, strides, values, strict=True):
        if kind in ("TensorList", "GenericList") and isinstance(shape, list):
            tensors = [_tensor(one, listed_dtype, None) for one in shape]
            operands.append(tuple(tensor for tensor in tensors if tensor is not None))
        else:
            tensor = _tensor(shape, kind, steps) if value == "" else None
            operands.append(str(value) if tensor is None else tensor)
    return PositionalCall(name.removeprefix("aten::"), tuple(operands))


def _tensor(shape: object, kind: object, strides: object) -> Tensor | None:
    if not isinstance(kind, str) or kind not in ITEMSIZE or not _is_sizes(shape):
        return None
    itemsize, dtype = ITEMSIZE[kind]
    known = strides if _is_sizes(strides) and len(strides) == len(shape) else [1] * len(shape)
    own = prod(size for size, stride in zip(shape, known, strict=True) if stride or size == 0)
    return Tensor(tuple(shape), own, itemsize, dtype)


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
        return False
    return all(isinstance(size, int) and 0 <= size < 1 << 62 for size in value)
