"""What the shell offers for values of arguments and options."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tilewright.bench.catalogue import SUITES
from tilewright.records.errors import TilewrightError

_RUNS = 20
Offered = Callable[[str], list[str]]


def offering(values: Iterable[str]) -> Offered:
    """Offers those of `values` that begin with what was typed."""
    known = tuple(values)
    return lambda incomplete: [value for value in known if value.startswith(incomplete)]


operators = offering(SUITES)
lessons = offering(("profiling", "softmax", "launches", "tiles", "gelu", "ladder", "attention", "block"))
languages = offering(("en", "zh"))
devices_here = offering(("cpu", "cuda"))
directions = offering(("fwd", "bwd", "fwd+bwd"))
dtypes = offering(("bf16", "fp32", "fp16", "fp64"))


def devices(incomplete: str) -> list[str]:
    """Devices whose rates are known."""
    from tilewright.hardware.profiles import profile_names

    return offering(profile_names())(incomplete)


def runs(incomplete: str) -> list[str]:
    """The newest runs, the latest first."""
    from tilewright.store.run_paths import all_runs

    try:
        newest = all_runs()[: -_RUNS - 1 : -1]
    except TilewrightError:
        return []
    return offering(map(str, newest))(incomplete)
