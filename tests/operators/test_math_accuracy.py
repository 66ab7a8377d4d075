"""The scalar functions of every generated CPU kernel, against float64 over the whole of fp32."""

import ctypes
from collections.abc import Callable

import pytest
import torch

from tilewright.emit.cpp import translation_unit
from tilewright.emit.cpp_text import LANES, from_storage, to_storage
from tilewright.runtime.compiler import load

LARGEST_ULPS = {
    "exp": 1.0,
    "exp2": 1.0,
    "expm1": 1.8,
    "log": 0.9,
    "log1p": 1.5,
    "log2": 1.7,
    "log10": 2.0,
    "tanh": 1.2,
    "erf": 2.5,
    "erfc": 3.0,
    "sigmoid": 2.6,
    "sqrt": 0.51,
    "rsqrt": 1.5,
    "sin": 1.8,
    "cos": 1.8,
    "tan": 3.1,
    "asin": 2.5,
    "acos": 1.9,
    "atan": 2.3,
    "sinh": 2.0,
    "cosh": 2.1,
}
"""The largest error measured, rounded up, in units of the result's last place: of glibc's vector forms where there are
some (2.36, AVX-512; of atan AVX2, which is less accurate), over five million points else."""

EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "floor": torch.floor,
    "ceil": torch.ceil,
    "trunc": torch.trunc,
    "rint": torch.round,
    "abs": torch.abs,
    "sign": torch.sign,
    "round_bfloat16": lambda x: x.bfloat16().float(),
    "round_float16": lambda x: x.half().float(),
}
DERIVATIVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": lambda y: 1 - y * y,
    "sigmoid": lambda y: y * (1 - y),
    "expm1": lambda y: y + 1,
}
"""Those that backward computes from the result, whose error they enlarge."""
PAIRS: dict[str, tuple[float, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "pow": (1.0, torch.pow),
    "atan2": (3.0, torch.atan2),
    "maximum": (0.0, torch.maximum),
    "minimum": (0.0, torch.minimum),
}


@pytest.fixture(scope="module")
def functions() -> ctypes.CDLL:
    """One vectorised loop for every function, in one source."""
    operands = dict.fromkeys((*LARGEST_ULPS, *EXACT, "erf_absolute"), "x[i]") | dict.fromkeys(PAIRS, "x[i], y[i]")
    texts = {n: f"tw_{'lanes_' if n in LANES else ''}{n}({given})" for n, given in operands.items()}
    texts |= {f"round_{dtype}": from_storage(to_storage("x[i]", dtype), dtype) for dtype in ("bfloat16", "float16")}
    loops = [
        f'extern "C" void all_{name}(const float* x, const float* y, float* out, int64_t n) {{\n'
        f"#pragma omp simd\nfor (int64_t i = 0; i < n; ++i) out[i] = {text}; }}"
        for name, text in texts.items()
    ]
    return load(translation_unit(loops))


@pytest.fixture(scope="module")
def points() -> torch.Tensor:
    """Every exponent with random bits, the ranges where the functions bend, and the special values."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32).view(torch.float32)
    bends = [
        torch.linspace(-110, 100, 100_001),
        torch.linspace(-1.1, 1.1, 50_001),
        1 + 1e-3 * torch.randn(50_000, generator=generator),
    ]
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float() * (1 + 2.0**-9)
    limits = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-126, 3.4e38]
    return torch.cat([bits, *bends, halves, torch.tensor(limits)])


def run(library: ctypes.CDLL, name: str, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.empty_like(x)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, x if y is None else y, out)]
    getattr(library, f"all_{name}")(*pointers, ctypes.c_int64(len(x)))
    return out


def ulps(result: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """The distance in units of fp32's last place at the true value, where fp32 can hold that value."""
    exponent = torch.frexp(truth.abs().clamp(min=2.0**-126))[1]
    distance = (result.double() - truth).abs() / torch.ldexp(torch.ones_like(truth), exponent - 24)
    return distance[truth.isfinite() & (truth.abs() <= torch.finfo(torch.float32).max)]


def same_specials(result: torch.Tensor, truth: torch.Tensor) -> bool:
    """NaN and both infinities where float64, rounded to fp32, has them."""
    rounded = truth.float()
    kinds = (torch.isnan, torch.isposinf, torch.isneginf)
    return all(torch.equal(kind(result), kind(rounded)) for kind in kinds)


@pytest.mark.parametrize("name", LARGEST_ULPS)
def test_error_in_units_of_the_last_place(functions: ctypes.CDLL, points: torch.Tensor, name: str) -> None:
    # Below -87 exp(-x) overflows on the way to a subnormal sigmoid, in PyTorch too.
    x = points[~(points < -87)] if name == "sigmoid" else points
    truth = getattr(torch, name)(x.double())
    result = run(functions, name, x)
    assert LARGEST_ULPS[name] <= 4
    assert ulps(result, truth).max() <= LARGEST_ULPS[name]
    assert same_specials(result, truth)


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_of_the_result_keep_the_contract_at_each_point(
    functions: ctypes.CDLL, points: torch.Tensor, name: str
) -> None:
    x = points[points.abs() < 20]
    truth = DERIVATIVES[name](getattr(torch, name)(x.double()))
    ours, eager = (DERIVATIVES[name](y.double()) for y in (run(functions, name, x), getattr(torch, name)(x)))
    unit = torch.ldexp(torch.ones_like(truth), torch.frexp(truth.abs().clamp(min=2.0**-126))[1] - 24)
    beyond = (ours - truth).abs() - 2 * (eager - truth).abs() - 4 * unit
    assert beyond.max() <= 0, x[beyond > 0]


def test_erf_for_sums_with_one(functions: ctypes.CDLL, points: torch.Tensor) -> None:
    result = run(functions, "erf_absolute", points)
    truth = torch.erf(points.double())
    assert (result.double() - truth).nan_to_num().abs().max() < 2**-22.4
    assert same_specials(result, truth)


@pytest.mark.parametrize("name", EXACT)
def test_exact_functions(functions: ctypes.CDLL, points: torch.Tensor, name: str) -> None:
    result = run(functions, name, points)
    torch.testing.assert_close(result, EXACT[name](points), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", PAIRS)
def test_functions_of_two_values(functions: ctypes.CDLL, points: torch.Tensor, name: str) -> None:
    bound, function = PAIRS[name]
    generator = torch.Generator().manual_seed(1)
    other = points[torch.randperm(len(points), generator=generator)]
    if name == "pow":
        other = other.clamp(-30, 30)
    truth = function(points.double(), other.double())
    result = run(functions, name, points, other)
    assert ulps(result, truth).max() <= bound
    assert same_specials(result, truth)
