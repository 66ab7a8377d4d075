"""Builds recipes: a kernel's Python function gets operands instead of tensors, and says what to allocate and launch.

    def softmax_recipe(call: RecipeBuilder, x: Operand, log: bool) -> Recipe:
        y = call.empty(x.shape, x.dtype)
        call.launch(kernel_for(x, y, log), (rows,), x, y, rows, columns)
        return call.finish(y)

An operand has a tensor's shape, strides, dtype, device and address modulo 128 bytes (`data_ptr`), but no elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from tilewright.launch.triton import POINTERS_LAST, loaded
from tilewright.records.errors import CompilerError
from tilewright.records.recipe import (
    LINE,
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
    dense_strides,
)

FORMATS = {"i1": "b", "i8": "b", "u8": "B", "i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f", "fp64": "d"}
"""The `struct` format of each type of a Triton kernel's parameters."""


@dataclass(frozen=True)
class Operand:
    """A tensor in a recipe: its metadata without its elements."""

    index: int
    """Its number among the recipe's tensors."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    residue: int = 0
    """The address of its first element modulo `LINE`, in bytes."""
    offset: int = 0
    """Bytes from the first element of the recipe's tensor to its own."""

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def data_ptr(self) -> int:
        """The address modulo `LINE`."""
        return self.residue

    def element_size(self) -> int:
        return self.dtype.itemsize

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return prod(self.shape)

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def stride(self, axis: int | None = None) -> Any:
        return self.strides if axis is None else self.strides[axis]

    def is_contiguous(self) -> bool:
        dense = zip(self.shape, self.strides, dense_strides(self.shape), strict=True)
        return all(size == 1 or stride == step for size, stride, step in dense)

    def as_strided(self, shape: Sequence[int], strides: Sequence[int], elements: int = 0) -> Operand:
        """The same memory with another shape and strides, from `elements` after the first element on."""
        added = elements * self.itemsize
        residue, offset = (self.residue + added) % LINE, self.offset + added
        return replace(self, shape=tuple(shape), strides=tuple(strides), residue=residue, offset=offset)


def operands_of(tensors: Sequence[torch.Tensor]) -> list[Operand]:
    """The operands that stand for these tensors, numbered from 0."""
    return [
        Operand(i, tuple(x.shape), tuple(x.stride()), x.dtype, x.device, x.data_ptr() % LINE)
        for i, x in enumerate(tensors)
    ]


class RecipeBuilder:
    """Collects the recipe of a call whose tensors are `inputs`.

    With `compiled`, Triton kernels are compiled now and launched through the driver. Otherwise Triton launches them,
    which only the Python twin supports: under Triton's interpreter, and where launches are recorded.
    """

    def __init__(self, name: str, inputs: Sequence[Operand], *, compiled: bool) -> None:
        self.name = name
        self.compiled = compiled
        self.inputs = tuple(inputs)
        self.device = inputs[0].device
        self._buffers: list[Layout] = []
        self._actions: list[Launch | Copy | Fill] = []
        self._advance = 0
        self._keep: list[Any] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Operand:
        """Memory for a result or for scratch; row-major unless `strides` (in elements) are given."""
        strides = dense_strides(shape) if strides is None else strides
        layout = Layout(tuple(shape), tuple(strides), dtype, self.device)
        self._buffers.append(layout)
        return Operand(len(self.inputs) + len(self._buffers) - 1, layout.shape, layout.strides, dtype, self.device)

    def empty_like(self, x: Operand) -> Operand:
        """Memory with the layout of `torch.empty_like(x)`."""
        meta = torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta")
        return self.empty(x.shape, x.dtype, torch.empty_like(meta).stride())

    def contiguous(self, x: Operand) -> Operand:
        """`x`, or a dense copy of it."""
        return x if x.is_contiguous() else self.copy(x)

    def copy(self, source: Operand, strides: Sequence[int] | None = None) -> Operand:
        """A copy with these strides (as `empty` takes them), for a kernel that cannot read `source` in its layout."""
        made = self.empty(source.shape, source.dtype, strides)
        self._actions.append(Copy(made.index, source.index))
        return made

    def fill(self, target: Operand, value: float) -> None:
        """Write one value to all elements of a buffer, or to those of an operand that is a part of one."""
        layout = Layout(target.shape, target.strides, target.dtype, self.device)
        is_whole = not target.offset and layout == self._buffers[target.index - len(self.inputs)]
        self._actions.append(Fill(target.index, value, None if is_whole else layout, target.offset // target.itemsize))

    def draw(self, advance: int) -> tuple[Seed, Offset]:
        """Seed and offset as arguments; each call advances the device's default generator by `advance`."""
        assert not self._advance, "a recipe draws once"
        self._advance = advance
        return Seed(), Offset()

    def keep(self, tensor: torch.Tensor) -> int:
        """The address of a tensor (a table on the device) that lives as long as the recipe."""
        self._keep.append(tensor)
        return tensor.data_ptr()

    def launch(self, kernel: Any, grid: Sequence[int], *arguments: Any, **options: Any) -> None:
        """Launch a CUDA C++ kernel, or a Triton kernel with its constants and options.

        An argument is an operand, None (a null pointer), a number, seed or offset, a tensor map or a structure; for a
        compiled Triton kernel also a `TensorDescriptor` of an operand.
        Raises CompilerError if the Triton kernel needs scratch memory of Triton's or a special launch.
        """
        x, y, z = (*grid, 1, 1)[:3]
        if x * y * z == 0:
            return
        if hasattr(kernel, "shared_bytes"):
            # If a structure is the only parameter, the signature lists its members.
            is_alone = len(arguments) == 1 and isinstance(arguments[0], Structure)
            letters = iter("" if is_alone else kernel.signature)
            placed = tuple(
                _argument(a, "" if isinstance(a, TensorMap | Structure) else next(letters)) for a in arguments
            )
            if next(letters, None) is not None:
                raise ValueError(f"{len(placed)} arguments for a kernel of the signature {kernel.signature}")
            self._actions.append(Launch(kernel, (x, y, z), placed))
        elif self.compiled:
            self._actions.append(_compiled(kernel, (x, y, z), arguments, options))
        else:
            described = {i: a for i, a in enumerate(arguments) if hasattr(a, "block_shape")}
            placed = tuple(_argument(getattr(a, "base", a), _guess(a)) for a in arguments)
            self._actions.append(Launch(UncompiledKernel(kernel, options, described), (x, y, z), placed))

    def finish(self, *results: Operand) -> Recipe:
        """The recipe; its results are these buffers."""
        first = len(self.inputs)
        return Recipe(
            self.name, self.device, tuple(x.residue for x in self.inputs), LINE, tuple(self._buffers),
            tuple(result.index - first for result in results), tuple(self._actions), self._advance, tuple(self._keep),
        )  # fmt: skip


@dataclass(frozen=True)
class UncompiledKernel:
    """A Triton kernel that Triton itself launches, with its constants and options."""

    kernel: Any
    options: dict[str, Any]
    described: dict[int, Any]
    """The tensor descriptors among the arguments, by position."""


def _compiled(kernel: Any, grid: tuple[int, int, int], arguments: Sequence[Any], options: dict[str, Any]) -> Launch:
    # Triton would specialise the kernel on small or aligned numbers; seed and offset change from call to call.
    given = [_LARGE if isinstance(a, Seed | Offset) else a for a in arguments]
    compiled = kernel.warmup(*given, grid=grid, **options)
    made = loaded(compiled)
    if made is None:
        raise CompilerError(f"{kernel.__name__} takes more than its parameters")
    named: dict[str, Any] = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    kinds = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
    placed: list[Argument] = []
    maps = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    for name, kind in kinds.items():
        if kind.startswith("tensordesc"):
            placed += _described(kernel.__name__, named[name], next(maps, None))
        else:
            placed.append(_argument(named[name], "P" if kind[0] == "*" else FORMATS[kind]))
    return Launch(made, grid, (*placed, *[Number("P", 0)] * POINTERS_LAST))


def _described(kernel: str, descriptor: Any, made: Any) -> list[Argument]:
    """The parameters that replace a tensor descriptor: map, shape, strides. `made` is Triton's metadata of the map."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    base, shape, strides = descriptor.base, descriptor.shape, descriptor.strides
    if made is None or made["fp4_padded"] or descriptor.padding != "zero" or base.offset:
        raise CompilerError(f"{kernel} takes a tensor descriptor that recipes do not support")
    nbytes = tuple(made["elem_size"] * stride for stride in reversed(strides[:-1]))
    dtype, box = TMA_DTYPE_DEVICE_TO_HOST[made["elem_type"]], tuple(reversed(made["block_size"]))
    encoded = TensorMap(base.index, dtype, tuple(reversed(shape)), nbytes, box, made["swizzle"], PROMOTE_TO_128B)
    return [encoded, *(Number("i", size) for size in shape), *(Number("q", stride) for stride in strides)]


SWIZZLE_128B, PROMOTE_TO_128B, PROMOTE_TO_256B = 3, 2, 3
"""CUtensorMapSwizzle, and CUtensorMapL2promotion of Triton's maps and of `tensor_map`."""
KINDS = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
"""CUtensorMapDataType."""


def tensor_map(x: Operand, box: Sequence[int]) -> TensorMap:
    """A tensor map for TMA copies of tiles of `box` elements, in x's order of axes; x has adjacent columns.

    Rows of a tile are swizzled by 128 bytes. Elements outside x are read as zeros.
    """
    assert not x.offset, "a tensor map begins where its tensor does"
    # An axis of size 1 may have any stride, even one that TMA rejects.
    outer = (s if size > 1 else LINE // x.itemsize for size, s in zip(x.shape[:-1], x.strides[:-1], strict=True))
    nbytes = [x.itemsize * stride for stride in outer]
    kind, sizes, box = KINDS[x.dtype], tuple(reversed(x.shape)), tuple(reversed(box))
    return TensorMap(x.index, kind, sizes, tuple(reversed(nbytes)), box, SWIZZLE_128B, PROMOTE_TO_256B)


_LARGE = (1 << 62) + 1
"""A number that Triton treats as 64-bit and not divisible by 16."""


def _guess(argument: Any) -> str:
    return "P" if argument is None else "d" if isinstance(argument, float) else "q"


def _argument(argument: Any, letter: str) -> Argument:
    if isinstance(argument, Operand):
        return Pointer(argument.index, argument.offset)
    if isinstance(argument, Seed | Offset | TensorMap | Structure):
        return argument
    return Number(letter, 0 if argument is None else argument)
