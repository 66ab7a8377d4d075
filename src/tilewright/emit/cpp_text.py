"""The C++ text of a nest's parts: types, constants, scalar functions, reductions, names."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from tilewright.emit.float8 import with_beyond
from tilewright.loops.nest import Nest, Step
from tilewright.loops.sizes import Factor, Size
from tilewright.operators.language import COMPUTE_DTYPE, FLOAT8

STORED = {
    "float32": "float", "float64": "double", "bfloat16": "uint16_t", "float16": "_Float16", "bool": "uint8_t",
    "int8": "int8_t", "uint8": "uint8_t", "int16": "int16_t", "int32": "int32_t", "int64": "int64_t",
    **dict.fromkeys(FLOAT8, "uint8_t"),
}  # fmt: skip
COMPUTED = STORED | {"bool": "bool"}

INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "idiv": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
         "eq": "==", "ne": "!=", "and": "&", "or": "|", "xor": "^"}  # fmt: skip
WRAPPING = {"int32": "uint32_t", "int64": "uint64_t"}
"""Integers whose overflow C++ leaves undefined, and PyTorch wraps around: they are computed without a sign.

C++ computes narrower ones as `int`, which holds their sums and products."""
CHEAP = frozenset(INFIX) | {"load", "const", "index", "check", "cast", "round", "neg", "abs", "where", "maximum",
                            "minimum", "isnan", "isinf", "bitnot", "floor", "ceil", "trunc", "sign"}  # fmt: skip

LANES = frozenset({"sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "erfc", "pow", "atan2"})
"""Functions of `libmvec.h`."""


@cache
def prelude(name: str = "prelude.h") -> str:
    """The text of a header of generated C++."""
    return (files("tilewright.emit") / name).read_text()


def wide(value: int) -> str:
    """An integer of 64 bits."""
    return str(value) if isinstance(value, Size) else f"{value}L"


def constant(value: bool | int | float, dtype: str) -> str:
    if isinstance(value, (Size, Factor)):
        return f"(({COMPUTED[dtype]}){value})"
    if dtype == "bool":
        return "true" if value else "false"
    if dtype not in ("float32", "float64"):
        return f"(({COMPUTED[dtype]}){int(value)}L)"
    suffix = "f" if dtype == "float32" else ""
    number = float(value)
    if number != number:
        return f'__builtin_nan{suffix}("")'
    if number in (float("inf"), float("-inf")):
        return f"{'-' if number < 0 else ''}__builtin_inf{suffix}()"
    return f"{number!r}{suffix}"


def identity(kind: str, dtype: str) -> str:
    if kind in ("sum", "any"):
        return "0"
    if kind in ("prod", "all"):
        return "1"
    if dtype in ("float32", "float64"):
        return "-TW_INF" if kind == "max" else "TW_INF"
    bits = {"bool": 1, "uint8": 8, "int8": 7, "int16": 15, "int32": 31, "int64": 63}[dtype]
    signed = dtype.startswith("int")
    high = f"(int64_t){(1 << bits) - 1}L"
    low = f"(-{high} - 1)" if signed else "0"
    return low if kind == "max" else high


def combine(kind: str, a: str, b: str) -> str:
    """`a` combined with `b`; max and min propagate NaN."""
    if kind in ("max", "min"):
        return f"tw_{kind}imum({a}, {b})"
    return f"{a} {dict(sum='+', prod='*', any='|', all='&')[kind]} {b}"


def from_storage(element: str, dtype: str) -> str:
    """An element of a buffer converted to its compute type."""
    if dtype in COMPUTE_DTYPE:
        return f"tw_from_{dtype}({element})"
    return f"{element} != 0" if dtype == "bool" else element


def to_storage(value: str, dtype: str) -> str:
    """A computed value converted to an element of a buffer."""
    if dtype in COMPUTE_DTYPE:
        return f"tw_to_{dtype}({with_beyond(dtype, value)})"
    return f"(uint8_t)({value} != 0)" if dtype == "bool" else value


def scalar(step: Step, args: list[str]) -> str:
    """A constant, conversion or scalar function of computed values."""
    kind = COMPUTED[step.dtype]
    if step.name == "const":
        assert step.constant is not None
        return constant(step.constant, step.dtype)
    if step.name == "round":
        to = step.to or ""
        return from_storage(to_storage(args[0], to), to)
    if step.name == "cast":
        return _cast(args[0], step.dtype)
    if step.name == "where":
        return f"{args[0]} ? {args[1]} : {args[2]}"
    if step.name in ("add", "sub", "mul", "neg") and (unsigned := WRAPPING.get(step.dtype)):
        first, *second = [f"({unsigned}){arg}" for arg in args]
        return f"({kind})(0 - {first})" if not second else f"({kind})({first} {INFIX[step.name]} {second[0]})"
    if step.name in INFIX:
        return f"({kind})({args[0]} {INFIX[step.name]} {args[1]})"
    if step.name in ("neg", "bitnot"):
        return f"({kind})({'-' if step.name == 'neg' else '~'}{args[0]})"
    if step.name == "isnan":
        return f"{args[0]} != {args[0]}"
    name = "rint" if step.name == "round_even" else step.name
    name = f"lanes_{name}" if name in LANES and step.dtype == "float32" else name
    return f"({kind})tw_{name}({', '.join(args)})"


def _cast(value: str, dtype: str) -> str:
    if dtype == "bool":
        return f"{value} != 0"
    return f"tw_to_{dtype}({value})" if "int" in dtype else f"({COMPUTED[dtype]}){value}"


def identifiers(nest: Nest) -> list[str]:
    """A distinct C identifier for each buffer, from its graph name."""
    names: list[str] = []
    for number, buffer in enumerate(nest.buffers):
        name = f"{buffer.name}_"
        names.append(f"{name}{number}" if name in names else name)
    return names
