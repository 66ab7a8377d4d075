"""A case: what every verb of tilewright works on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from tilewright.records.errors import UsageError

DTYPES = {
    "fp32": "float32",
    "f32": "float32",
    "float32": "float32",
    "fp64": "float64",
    "f64": "float64",
    "float64": "float64",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "float16": "float16",
    "i64": "int64",
    "int64": "int64",
    "i32": "int32",
    "int32": "int32",
    "i16": "int16",
    "int16": "int16",
    "i8": "int8",
    "int8": "int8",
    "u8": "uint8",
    "uint8": "uint8",
    "bool": "bool",
    "c64": "complex64",
    "complex64": "complex64",
    "c128": "complex128",
    "complex128": "complex128",
}


@dataclass(frozen=True)
class InputSpec:
    """One tensor input: its dtype, and for each axis its size and its name (or None).

    >>> InputSpec.parse("bf16[B=16,S=1024,768]")
    InputSpec(dtype='bfloat16', shape=(16, 1024, 768), names=('B', 'S', None), bounds=None)
    """

    dtype: str
    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    bounds: tuple[int, int] | None = None
    """The least integer drawn, and the first that is not; None: 0 and 1 are drawn."""

    @staticmethod
    def parse(text: str) -> InputSpec:
        """One input, as on the command line. Raises UsageError."""
        specs = InputSpec.parse_many(text)
        if len(specs) != 1:
            raise UsageError(f"input {text!r} is {len(specs)} inputs, not one")
        return specs[0]

    @staticmethod
    def parse_many(text: str) -> tuple[InputSpec, ...]:
        """Several positional tensors, separated by commas or semicolons. Raises UsageError.

        >>> [spec.shape for spec in InputSpec.parse_many("fp32[N=2], fp32[N,M=3]")]
        [(2,), (2, 3)]
        """
        from tilewright.records.input_grammar import parse_arguments

        positional, keywords = parse_arguments(text)
        if keywords or not all(isinstance(one, InputSpec) for one in positional):
            raise UsageError(f"input {text!r} is more than a list of tensors without names")
        return positional

    @staticmethod
    def of(tensor: Any) -> InputSpec:
        """The spec of an example tensor; its axes have no names."""
        if isinstance(tensor, InputSpec):
            return tensor
        shape = tuple(map(int, tensor.shape))
        return InputSpec(str(tensor.dtype).removeprefix("torch."), shape, (None,) * len(shape))


@dataclass(frozen=True)
class Case:
    """A function or module, its inputs, and names for its dimensions.

    `build()` returns the callable (each call builds a new module; the caller seeds the parameters). `inputs` are its
    positional arguments and `keywords` its named ones: an `InputSpec` for each tensor to draw, or an example tensor, or
    numbers, and lists, tuples, dicts and dataclasses of these. `dims` names sizes that appear in no input axis (heads,
    hidden width) so that costs can print in them: `{"H": 12}`.
    """

    name: str
    build: Callable[[], Callable[..., Any]]
    inputs: Sequence[Any]
    dims: Mapping[str, int] = field(default_factory=dict)
    training: bool = True
    """True: forward and backward are captured, verified and timed. False: inference only."""
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def specs(self) -> list[InputSpec]:
        """One for each tensor among the arguments, in order."""
        return [InputSpec.of(leaf) for leaf in leaves((tuple(self.inputs), dict(self.keywords)))]

    def named_sizes(self) -> dict[str, int]:
        """Every named dimension with its size, those of the inputs first."""
        sizes = {name: size for spec in self.specs() for name, size in zip(spec.names, spec.shape, strict=True) if name}
        return sizes | dict(self.dims)


@dataclass(frozen=True)
class CopyOf:
    """The `build` of a module that exists: each is a copy, so that a run cannot change the parameters and buffers of
    the next."""

    module: Callable[..., Any]

    def __call__(self) -> Callable[..., Any]:
        return copy.deepcopy(self.module)


def leaves(value: Any) -> Iterator[Any]:
    """The tensors, and specs of tensors, inside tuples, lists, mappings and dataclasses, in order."""
    for _, leaf in named_leaves(value, ""):
        yield leaf


def named_leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """`leaves` with their paths from `name`: `output[0]`, `output['loss']`, `output.logits`."""
    if _is_leaf(value):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from named_leaves(part, f"{name}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from named_leaves(part, f"{name}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from named_leaves(getattr(value, one.name, None), f"{name}.{one.name}")


def with_leaves(value: Any, tensors: Iterator[Any]) -> Any:
    """`value` with the next of `tensors` in place of each leaf."""
    if _is_leaf(value):
        return next(tensors)
    if isinstance(value, Mapping):
        return {key: with_leaves(part, tensors) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [with_leaves(part, tensors) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        copied = object.__new__(type(value))
        for one in fields(value):
            object.__setattr__(copied, one.name, with_leaves(getattr(value, one.name, None), tensors))
        return copied
    return value


def _is_leaf(value: Any) -> bool:
    # Not `torch.Tensor`: this package does not import PyTorch.
    return isinstance(value, InputSpec) or all(hasattr(value, name) for name in ("dtype", "shape", "stride"))
