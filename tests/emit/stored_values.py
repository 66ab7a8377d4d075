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
