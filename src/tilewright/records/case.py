"""A case: what every verb of tilewright works on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    "i8": "int8",
    "int8": "int8",
    "u8": "uint8",
    "uint8": "uint8",
    "bool": "bool",
}


@dataclass(frozen=True)
class InputSpec:
    """One tensor input: its dtype, and for each axis its size and its name (or None).

    >>> InputSpec.parse("bf16[B=16,S=1024,768]")
    InputSpec(dtype='bfloat16', shape=(16, 1024, 768), names=('B', 'S', None))
    """

    dtype: str
    shape: tuple[int, ...]
    names: tuple[str | None, ...]

    @staticmethod
    def parse(text: str) -> InputSpec:
        match = re.fullmatch(r"\s*(\w+)\s*\[([^\]]*)\]\s*", text)
        if not match or match[1] not in DTYPES:
            raise UsageError(
                f"input {text!r} is not of the form DTYPE[NAME=SIZE,...], e.g. fp32[N=4000,M=5000]; "
                f"dtypes: {', '.join(DTYPES)}"
            )
        shape: list[int] = []
        names: list[str | None] = []
        for axis in filter(None, (part.strip() for part in match[2].split(","))):
            name, _, size = axis.rpartition("=")
            if not size.strip().isdigit():
                raise UsageError(f"input {text!r}: axis {axis!r} has no size")
            shape.append(int(size))
            names.append(name.strip() or None)
        return InputSpec(DTYPES[match[1]], tuple(shape), tuple(names))

    @staticmethod
    def parse_many(text: str) -> tuple[InputSpec, ...]:
        """Several inputs, separated by `;` or by a comma between brackets.

        >>> [spec.shape for spec in InputSpec.parse_many("fp32[N=2], fp32[N=2,M=3]")]
        [(2,), (2, 3)]
        """
        parts = re.findall(r"[^;,\[\]]*\[[^\]]*\]", text)
        if not parts:
            raise UsageError(f"no input in {text!r}; e.g. fp32[N=4000,M=5000]")
        return tuple(InputSpec.parse(part) for part in parts)


@dataclass(frozen=True)
class Case:
    """A function or module, its inputs, and names for its dimensions.

    `build()` returns the callable (each call builds a new module; the caller seeds the parameters);
    `inputs` describes its tensor arguments. `dims` names sizes that appear in no input axis (heads,
    hidden width) so that costs can print in them: `{"H": 12}`.
    """

    name: str
    build: Callable[[], Callable[..., Any]]
    inputs: Sequence[InputSpec]
    dims: Mapping[str, int] = field(default_factory=dict)
    training: bool = True
    """True: forward and backward are captured, verified and timed. False: inference only."""

    def named_sizes(self) -> dict[str, int]:
        """Every named dimension with its size, those of the inputs first."""
        sizes = {name: size for spec in self.inputs for name, size in zip(spec.names, spec.shape, strict=True) if name}
        return sizes | dict(self.dims)
