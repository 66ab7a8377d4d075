"""A row of a bench result, a ceiling of a device, and a tensor checked against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Direction = Literal["fwd", "bwd", "fwd+bwd", "step", "infer"]


@dataclass(frozen=True)
class Measurement:
    """One row of a bench result file; times in microseconds, memory in bytes."""

    suite: str
    case: str
    impl: str
    direction: Direction
    median_us: float
    p20_us: float
    p80_us: float
    repeats: int
    predicted_us: float | None = None
    host_us: float | None = None
    gpu_us: float | None = None
    """Sum of the times of the kernels and copies on the device."""
    launches: int | None = None
    """How many kernels and copies those are."""
    first_call_us: float | None = None
    """Time of the first call, in which an implementation compiles."""
    peak_bytes: int | None = None
    bytes: int | None = None
    flops: int | None = None
    GBps: float | None = None
    TFLOPs: float | None = None
    of_ceiling: float | None = None
    error: float | None = None
    eager_error: float | None = None
    device: str = ""
    threads: int = 0
    torch: str = ""
    triton: str = ""
    commit: str = ""
    sources: str = ""
    """The digest of tilewright's sources that were measured (`records/sources.py`); "" for others' rows."""
    package: str = ""
    """The package that was measured, with its version, where it is neither tilewright nor PyTorch."""
    date: str = ""
    note: str = ""
    """Warnings about the figure: clocks that disagree or dropped, data that was in a cache."""


Origin: TypeAlias = Literal["measured", "measured on a busy machine", "datasheet"]
BUSY: Literal["measured on a busy machine"] = "measured on a busy machine"
"""The origin of a ceiling that is too low, since other programs ran."""


@dataclass(frozen=True)
class Ceiling:
    """A rate or latency of a device. `kind`: copy, read, write, matmul, vector, launch; unit GB/s, TFLOP/s, us."""

    device: str
    kind: str
    dtype: str
    value: float
    unit: str
    origin: Origin

    @property
    def figure(self) -> str:
        """The value in a unit that suits it."""
        return rate_figure(self.value, self.unit)


def rate_figure(value: float, unit: str) -> str:
    """A rate or latency in a unit that suits it.

    >>> rate_figure(0.05541, "TFLOP/s"), rate_figure(4255.4, "GB/s")
    ('55.41 GFLOP/s', '4,255 GB/s')
    """
    if unit == "TFLOP/s" and value < 1:
        return f"{value * 1e3:,.4g} GFLOP/s"
    return f"{value:,.4g} {unit.replace('us', 'µs')}"


@dataclass(frozen=True)
class Verified:
    """One tensor of an optimised program against float64, beside eager's own error."""

    direction: Literal["fwd", "bwd"]
    tensor: str
    dtype: str
    error: float
    """Relative norm error of the optimised program against float64."""
    eager_error: float
    max_error: float
    """Largest absolute error."""
    eager_max_error: float
    bound: float
    max_bound: float
    ok: bool
