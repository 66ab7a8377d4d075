"""Formats numbers with units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewright.records.measurement import Measurement


def count(value: float) -> str:
    """A count: in full if it is short, else with three digits and a decimal prefix.

    >>> count(4000), count(20_000_000), count(1.5e12)
    ('4,000', '20.0 M', '1.50 T')
    """
    if not math.isfinite(value):
        return _not_finite(value)
    return f"{value:,.0f}" if abs(value) < 100_000 else _scaled(value, ("", "k", "M", "G", "T", "P", "E"))


def nbytes(value: float) -> str:
    """Bytes, in powers of 1000.

    >>> nbytes(512), nbytes(80_000_000)
    ('512 B', '80.0 MB')
    """
    if not math.isfinite(value):
        return _not_finite(value)
    return f"{value:.0f} B" if abs(value) < 1000 else _scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"))


def duration(us: float | None) -> str:
    """Microseconds in a suitable unit; a dash for None.

    >>> duration(0.25), duration(4700.0), duration(None)
    ('0.250 µs', '4.70 ms', '-')
    """
    if us is None:
        return "-"
    if not math.isfinite(us):
        return _not_finite(us)
    if abs(us) < 1:
        return f"{us:.3f} µs"
    return _scaled(us, ("µs", "ms", "s"))


def ratio(value: float | None) -> str:
    """How many times.

    >>> ratio(10.0), ratio(0.98), ratio(250.0)
    ('10.0×', '0.98×', '250×')
    """
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.2f}×" if value < 9.995 else f"{value:.1f}×" if value < 99.95 else f"{value:,.0f}×"


_WIDEST = 3.0
"""Ratios of the fastest fifths and of the slowest may differ by as much."""


def speed_of(row: Measurement, peer: Measurement) -> str:
    """How many times as fast as `peer`; `noisy` where the spread of both leaves the ratio open."""
    if not row.median_us:
        return "-"
    least, most = peer.p20_us * row.p20_us, peer.p80_us * row.p80_us
    return ratio(peer.median_us / row.median_us) if most <= _WIDEST * least else "noisy"


def in_names(formula: str, names: Sequence[str]) -> str:
    """A cost formula as text, in the case's order of names; other text unchanged.

    >>> in_names("2*N + 5*M*N", ["N", "M"]), in_names("N.M", [])
    ('5·N·M + 2·N', 'N.M')
    """
    from tilewright.cost.symbols import pretty

    try:
        return pretty(formula, names)
    except ValueError:
        return formula


def _scaled(value: float, units: tuple[str, ...]) -> str:
    """Three significant digits; the next unit if rounding would give four."""
    step = 0
    while abs(value) >= 999.5 and step < len(units) - 1:
        value, step = value / 1000, step + 1
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{digits}f} {units[step]}".rstrip()


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
