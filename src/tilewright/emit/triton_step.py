"""One step of a nest as a Triton expression."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tilewright.emit.float8 import with_beyond
from tilewright.loops.nest import Step
from tilewright.loops.sizes import Factor, Size
from tilewright.operators.language import FLOAT8

INFIX = {"add": "+", "sub": "-", "mul": "*", "idiv": "//", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
         "eq": "==", "ne": "!=", "and": "&", "or": "|", "xor": "^"}  # fmt: skip
BOOLEAN = {"add": "|", "mul": "&", "maximum": "|", "minimum": "&"}
"""Arithmetic on bool."""
LANGUAGE = frozenset({"exp2", "log", "log2", "sin", "cos", "erf", "floor", "ceil", "abs"})
"""Functions of `triton.language` that are accurate enough."""
LIBDEVICE = frozenset(
    {"acos", "asin", "atan", "atan2", "cosh", "erfc", "expm1", "log10", "log1p", "pow", "rsqrt", "sinh", "tan"}
)
"""Functions of fp32 and fp64 from NVIDIA's library, as eager's kernels call them; the others are in `triton_math`."""
OF_EAGER = {
    "exp": "libdevice.exp({0})",
    "tanh": "libdevice.tanh({0})",
    "sigmoid": "tl.div_rn(1.0, 1.0 + libdevice.exp(-{0}))",
}
"""Functions of fp32 of which `triton_math` has faster ones that round otherwise, as eager's kernels compute them."""
FLOATS = ("float32", "float64")
UNSIGNED_LIMIT = {"uint8": 1 << 8}
SIGNED_BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}

Argument = Callable[[int, bool], str]
"""`argument(position, literal)`: the text of an operand; with `literal`, a constant may be a bare number."""


def in_memory(dtype: str) -> str:
    """The dtype of a kernel's pointers to tensors of `dtype`: floats of 8 bits are bytes."""
    return "uint8" if dtype in FLOAT8 else dtype


def type_name(dtype: str) -> str:
    return "tl.int1" if dtype == "bool" else f"tl.{dtype}"


def literal(value: bool | int | float, dtype: str) -> str:
    """A constant as Python text; integers wrap around as in PyTorch. An argument of the kernel is Triton's number."""
    if isinstance(value, (Size, Factor)) and dtype in (*FLOATS, "int64", "int32"):
        return f"tl.full((), {value}, {type_name(dtype)})"
    if dtype == "bool":
        return str(bool(value))
    if dtype in FLOATS:
        number = float(value)
        return repr(number) if abs(number) < float("inf") else f'float("{number}")'
    whole = int(value)
    if dtype in UNSIGNED_LIMIT:
        return str(whole % UNSIGNED_LIMIT[dtype])
    half = 1 << (SIGNED_BITS[dtype] - 1)
    return str((whole + half) % (2 * half) - half)


def identity(kind: str, dtype: str) -> str:
    """The identity of a reduction."""
    if kind in ("sum", "prod"):
        return literal(kind == "prod", dtype)
    if kind in ("any", "all"):
        return str(kind == "all")
    if dtype in FLOATS:
        return literal(float("-inf") if kind == "max" else float("inf"), dtype)
    if dtype == "bool":
        return str(kind == "min")
    if dtype in UNSIGNED_LIMIT:
        return "0" if kind == "max" else str(UNSIGNED_LIMIT[dtype] - 1)
    half = 1 << (SIGNED_BITS[dtype] - 1)
    return str(-half if kind == "max" else half - 1)


def combine(kind: str, dtype: str, a: str, b: str) -> str:
    """Two partial results of a reduction, combined."""
    if kind in ("any", "all") or dtype == "bool":
        return f"{a} {'|' if kind in ('any', 'max', 'sum') else '&'} {b}"
    if kind in ("max", "min"):
        return f"{'tw' if dtype in FLOATS else 'tl'}.{kind}imum({a}, {b})"
    return f"{a} {'+' if kind == 'sum' else '*'} {b}"


def reduce(kind: str, dtype: str, value: str, axis: int) -> str:
    """`value`, a block of `dtype`, reduced along one axis, which keeps length 1."""
    along = f"axis={axis}, keep_dims=True"
    if dtype == "bool":
        extreme = "max" if kind in ("any", "max", "sum") else "min"
        return f"tl.{extreme}(({value}).to(tl.int32), {along}) != 0"
    if kind == "prod":
        return f"tw.product_over({value}, {along})"
    if dtype in FLOATS:
        return f"tl.sum({value}, {along})" if kind == "sum" else f"tw.{kind}_over({value}, {along})"
    # Triton widens narrow integers in its reductions.
    return f"tl.{kind}({value}, {along}).to({type_name(dtype)})"


def scan(kind: str, value: str) -> str:
    """`value`, a block, reduced along its columns up to each of them."""
    return f"tl.cum{kind}({value}, 1)"


def expression(step: Step, argument: Argument, operand_dtype: str, exact: bool = False) -> str:
    """A step other than `load`, `const`, `index`, reductions and scans; `operand_dtype` is that of its last operand.

    `exact` says that a discontinuous operator depends on it: it has the bits of eager's kernels.
    """

    def args(literals: bool) -> list[str]:
        return [argument(a, literals) for a in step.args]

    name, floating = step.name, step.dtype in FLOATS
    if name == "round":
        to = step.to or ""
        return from_storage(to, "float32", to_storage(to, args(False)[0]))
    if name == "cast":
        return _cast(args(False)[0], operand_dtype, step.dtype)
    if name == "where":
        return f"tl.where({', '.join(args(True))})"
    if step.dtype == "bool" and name in BOOLEAN:
        return f" {BOOLEAN[name]} ".join(args(True))
    if name in INFIX:
        return f" {INFIX[name]} ".join(args(True))
    if name == "div" and (factor := _reciprocal(args(True)[1], step.dtype)) is not None:
        return f"{args(True)[0]} * {factor}"
    if step.approximate:
        return _approximation(name, args(name == "div"))
    if name == "div":
        return " / ".join(args(True)) if step.dtype == "float64" else f"tl.div_rn({', '.join(args(True))})"
    if name in ("maximum", "minimum"):
        return f"{'tw' if floating else 'tl'}.{name}({', '.join(args(True))})"
    if exact and step.dtype == "float32" and name in OF_EAGER:
        return OF_EAGER[name].format(args(False)[0])
    return _function(name, args(False), floating, operand_dtype)


def _reciprocal(divisor: str, dtype: str) -> str | None:
    """1 / divisor as text, if the divisor is a number and this is exact: a power of two."""
    try:
        number = float(divisor)
    except ValueError:
        return None
    mantissa, exponent = math.frexp(number)
    return literal(1 / number, dtype) if abs(mantissa) == 0.5 and abs(exponent) < 100 else None


def _approximation(name: str, args: Sequence[str]) -> str:
    """By the hardware's own exponential and division: a silu of bf16 takes a quarter of the instructions."""
    if name == "div":
        return " / ".join(args)
    return f"tw.{name}_approximate({args[0]})"


def _function(name: str, args: Sequence[str], floating: bool, operand_dtype: str) -> str:
    x = args[0]
    if name == "isnan":
        return f"{x} != {x}"
    if name == "isinf":
        return f'tl.abs({x}) == float("inf")' if operand_dtype in FLOATS else f"{x} != {x}"
    if name == "bitnot":
        # The interpreter cannot invert unsigned integers.
        return f"{x} ^ {UNSIGNED_LIMIT[operand_dtype] - 1}" if operand_dtype in UNSIGNED_LIMIT else f"~{x}"
    if name == "neg" and not floating:
        return f"-{x}"
    if name == "abs" and operand_dtype in ("bool", *UNSIGNED_LIMIT):
        return x
    if name == "pow" and not floating:
        name = "integer_power"
    module = "tl" if name in LANGUAGE else "libdevice" if name in LIBDEVICE else "tw"
    return f"{module}.{name}({', '.join(args)})"


VIA = {"uint8": "int64", "int8": "int32", "int16": "int32"}


def _cast(value: str, source: str, target: str) -> str:
    if target == "bool":
        return f"{value} != 0"
    if target in VIA and source in FLOATS:
        # Out-of-range numbers wrap around, as in PyTorch; a direct conversion leaves them undefined.
        return f"{value}.to(tl.{VIA[target]}).to(tl.{target})"
    return f"{value}.to({type_name(target)})"


def to_storage(dtype: str, value: str) -> str:
    """A computed value converted to the dtype of memory."""
    if dtype == "bfloat16" or dtype in FLOAT8:
        return f"tw.to_{dtype}({with_beyond(dtype, value)})"
    return f"{value}.to(tl.float16)" if dtype == "float16" else value


def from_storage(dtype: str, computed: str, value: str) -> str:
    """An element of memory converted to the dtype that it is computed in."""
    if dtype in FLOAT8:
        return f"tw.from_{dtype}({value})"
    return value if dtype == computed else f"{value}.to({type_name(computed)})"
