"""16-bit values that a program stores and converts to a wider dtype, for the tests of both emitters."""

from collections.abc import Callable

import torch

from tests.contract import launched, recorded

F32, F64 = torch.float32, torch.float64
DTYPES = (torch.bfloat16, torch.float16)
Program = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]


def _y(x: torch.Tensor) -> torch.Tensor:
    return x * 1.1 + x


def _scale(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scale = (448.0 / x.amax(1, keepdim=True).clamp(min=1e-3)).float()
    return scale, x.float() * scale


PROGRAMS: dict[str, Program] = {
    "cast": lambda x, w: (_y(x), _y(x).float() - 1, _y(x).double().clamp(max=2)),
    "cast of a view": lambda x, w: (_y(x), _y(x).view(4, -1).t().float() + 1),
    "cast of what is not stored": lambda x, w: (_y(x).float() - x.float(),),
    "promotion": lambda x, w: (_y(x), _y(x) + w, torch.where(w > 0, _y(x), w), torch.maximum(_y(x), w)),
    "comparison": lambda x, w: (_y(x), _y(x) > _y(x).float(), _y(x) == w.to(x.dtype)),
    "dtype of a sum": lambda x, w: (_y(x), _y(x).amax(1), _y(x).sum((0, 1), dtype=F64).float()),
    "scale": _scale,
    "from integers": lambda x, w: (x + (w * 1e4).long(), x * (w * 1e4).int(), x / (1 + (w * 1e4).long().abs())),
    "from a number in a tensor": lambda x, w: (x + w[0, 0], x - w[0, 0], x * w[0, 0], x / w[0, 0]),
}


def differing(dtype: torch.dtype) -> list[str]:
    """Results that are not bitwise eager's. All programs are compiled as one, with an operand each."""
    generator = torch.Generator().manual_seed(5)
    w = torch.randn(8, 36, generator=generator)
    given = [torch.randn(8, 36, generator=generator).to(dtype) for _ in PROGRAMS]

    def all_programs(w: torch.Tensor, *given: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        return [program(x, w) for program, x in zip(PROGRAMS.values(), given, strict=True)]

    call, record = recorded(all_programs)
    pairs = zip(PROGRAMS, call(w, *given), all_programs(w, *given), strict=True)
    assert set(launched(record)) == {"kernel"}
    return [
        f"{name} {i}"
        for name, ours, eager in pairs
        for i, (a, b) in enumerate(zip(ours, eager, strict=True))
        if not torch.equal(a, b)
    ]


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SOURCES = (torch.bfloat16, torch.float16, torch.float32)
LIMITS = (464.0, 464.00003, 479.0, 480.0, 61439.996, 61440.0, 65536.0, 2.0**-6, 2.0**-9, 2.0**-10, 2.0**-16, 2.0**-17)


def numbers(source: torch.dtype) -> torch.Tensor:
    """All of 16 bits; of 32 those that bf16 has, and some between them."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    if source is not torch.float32:
        return patterns.view(source)
    drawn = torch.randn(20000, generator=torch.Generator().manual_seed(0))
    limits = torch.tensor(LIMITS)
    return torch.cat([patterns.view(torch.bfloat16).float(), drawn * 300, drawn / 1000, limits, -limits])


def conversions(dtype: torch.dtype, source: torch.dtype) -> list[tuple[Callable[..., torch.Tensor], torch.Tensor]]:
    """Functions and what to call them with: to `dtype`, to it and back between other operators, from it."""
    x = numbers(source)
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    return [
        (lambda x: x.to(dtype), x),
        (lambda x: (x.float() * 1.5).to(dtype).float() * 0.7, x),
        (lambda y: y.to(source) * 2, every),
    ]


def same(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, but for the bits of NaN."""
    result, expected = result.float(), expected.float()
    nan = expected.isnan()
    return torch.equal(result.isnan(), nan) and torch.equal(
        result.where(~nan, 0).view(torch.int32), expected.where(~nan, 0).view(torch.int32)
    )
