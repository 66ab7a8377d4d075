"""Builds recipes: a kernel's Python function gets operands instead of tensors, and says what to allocate and launch.

    def softmax_recipe(call: RecipeBuilder, x: Operand, log: bool) -> Recipe:
        y = call.empty(x.shape, x.dtype)
        call.launch(kernel_for(x, y, log), (rows,), x, y, rows, columns)
        return call.finish(y)

An operand has what planning asks of a tensor: shape, strides, dtype, device, and where it begins within a line of 128
bytes (`data_ptr`). It has no elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
)

FORMATS = {"i1": "b", "i8": "b", "u8": "B", "i32": "i", "u32": "I", "i64": "q", "u64": "Q", "fp32": "f", "fp64": "d"}
"""Letters of `struct` for the types of Triton's parameters."""


@dataclass(frozen=True)
class Operand:
    """A tensor as a recipe knows it."""

    index: int
    """Its number in the recipe."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    residue: int = 0
    """Bytes from the begin of a line to its first element."""
    offset: int = 0
    """Bytes from the begin of the recipe's tensor to its first element."""

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
        count = 1
        for size in self.shape:
            count *= size
        return count

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def stride(self, axis: int | None = None) -> Any:
        return self.strides if axis is None else self.strides[axis]

    def is_contiguous(self) -> bool:
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    def as_strided(self, shape: Sequence[int], strides: Sequence[int], elements: int = 0) -> Operand:
        """The same memory under another shape, `elements` further on."""
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
    """Collects one recipe, for a call whose tensors are `inputs`.

    `compiled`: Triton's kernels are compiled now, and launched by the driver; else Triton launches them itself, which
    only the Python twin can do: in its interpreter, and where launches are recorded.
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
        """Memory for a result or for scratch; dense in the order of its axes unless `strides` say otherwise."""
        if strides is None:
            strides, step = [], 1
            for size in reversed(shape):
                strides = [step, *strides]
                step *= max(size, 1)
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
        """A copy with the layout of `empty`, for kernels that cannot read `source` in its layout."""
        made = self.empty(source.shape, source.dtype, strides)
        self._actions.append(Copy(made.index, source.index))
        return made

    def fill(self, target: Operand, value: float) -> None:
        """Write one value to all of a buffer, or to the part of it that an operand shows."""
        layout = Layout(target.shape, target.strides, target.dtype, self.device)
        is_whole = not target.offset and layout == self._buffers[target.index - len(self.inputs)]
        self._actions.append(Fill(target.index, value, None if is_whole else layout, target.offset // target.itemsize))

    def draw(self, advance: int) -> tuple[Seed, Offset]:
        """Seed and offset as arguments; the device's default generator advances by `advance`, once a recipe."""
        assert not self._advance, "a recipe draws once"
        self._advance = advance
        return Seed(), Offset()

    def keep(self, tensor: torch.Tensor) -> int:
        """The address of a tensor that is kept as long as the recipe: a table on the device."""
        self._keep.append(tensor)
        return tensor.data_ptr()

    def launch(self, kernel: Any, grid: Sequence[int], *arguments: Any, **options: Any) -> None:
        """Launch a CUDA C++ kernel, or one of Triton's with its constants and options.

        An argument is an operand, None (a null pointer), a number, seed or offset, a tensor map or a structure; for
        one of Triton's that is compiled, also a `TensorDescriptor` of an operand.
        Raises CompilerError where Triton's kernel takes more than its parameters.
        """
        x, y, z = (*grid, 1, 1)[:3]
        if x * y * z == 0:
            return
        if hasattr(kernel, "shared_bytes"):
            # A structure that is the only parameter: the signature has its members.
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
        """The recipe, whose results are these buffers."""
        first = len(self.inputs)
        return Recipe(
            self.name, self.device, tuple(x.residue for x in self.inputs), LINE, tuple(self._buffers),
            tuple(result.index - first for result in results), tuple(self._actions), self._advance, tuple(self._keep),
        )  # fmt: skip


@dataclass(frozen=True)
class UncompiledKernel:
    """A kernel that Triton launches, with its constants and options."""

    kernel: Any
    options: dict[str, Any]
    described: dict[int, Any]
    """Arguments, by place, that are tensor descriptors of operands."""


def _compiled(kernel: Any, grid: tuple[int, int, int], arguments: Sequence[Any], options: dict[str, Any]) -> Launch:
    # Seed and offset are 64-bit numbers that are nothing else to Triton.
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
    """A tensor descriptor as Triton's kernels take it: map, shape, strides. `made`: what Triton says of the map."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    base, shape, strides = descriptor.base, descriptor.shape, descriptor.strides
    if made is None or made["fp4_padded"] or descriptor.padding != "zero" or base.offset:
        raise CompilerError(f"{kernel} takes a tensor descriptor that no recipe has")
    nbytes = tuple(made["elem_size"] * stride for stride in reversed(strides[:-1]))
    dtype, box = TMA_DTYPE_DEVICE_TO_HOST[made["elem_type"]], tuple(reversed(made["block_size"]))
    encoded = TensorMap(base.index, dtype, tuple(reversed(shape)), nbytes, box, made["swizzle"], PROMOTE_TO_128B)
    return [encoded, *(Number("i", size) for size in shape), *(Number("q", stride) for stride in strides)]


SWIZZLE_128B, PROMOTE_TO_128B, PROMOTE_TO_256B = 3, 2, 3
"""CUtensorMapSwizzle; CUtensorMapL2promotion, as Triton has it and as `tensor_map` has."""
KINDS = {torch.float16: 6, torch.bfloat16: 9}
"""CUtensorMapDataType."""


def tensor_map(x: Operand, box: Sequence[int]) -> TensorMap:
    """By which bulk copies move tiles of `box` elements of a 16-bit operand with adjacent columns.

    Axes are in the order of its shape. Rows of a tile are swizzled by 128 bytes; past the operand's ends are zeros.
    """
    assert not x.offset, "a tensor map begins where its tensor does"
    # An axis of one may have any stride, also one that the copy engine does not take.
    outer = (s if size > 1 else LINE // x.itemsize for size, s in zip(x.shape[:-1], x.strides[:-1], strict=True))
    nbytes = [x.itemsize * stride for stride in outer]
    kind, sizes, box = KINDS[x.dtype], tuple(reversed(x.shape)), tuple(reversed(box))
    return TensorMap(x.index, kind, sizes, tuple(reversed(nbytes)), box, SWIZZLE_128B, PROMOTE_TO_256B)


_LARGE = (1 << 62) + 1
"""A number that Triton takes for 64 bits and for no multiple of 16."""


def _guess(argument: Any) -> str:
    return "P" if argument is None else "d" if isinstance(argument, float) else "q"


def _argument(argument: Any, letter: str) -> Argument:
    if isinstance(argument, Operand):
        return Pointer(argument.index, argument.offset)
    if isinstance(argument, Seed | Offset | TensorMap | Structure):
        return argument
    return Number(letter, 0 if argument is None else argument)
