"""tilewright: how far each operator of a model is from the hardware's limit, and the kernel that closes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright import functional
    from tilewright.bench import benchmark
    from tilewright.profiling.block import profile
    from tilewright.records.case import Case, InputSpec
    from tilewright.verbs import explain, explain_case, optimize, optimize_case
    from tilewright.verbs.questions import diff, sql

__version__ = "0.2.0"

__all__ = [
    "Case", "InputSpec", "benchmark", "diff", "explain", "explain_case", "functional", "optimize", "optimize_case",
    "profile", "sql",
]  # fmt: skip

_HOMES = {
    "Case": "tilewright.records.case",
    "InputSpec": "tilewright.records.case",
    "benchmark": "tilewright.bench",
    "diff": "tilewright.verbs.questions",
    "explain": "tilewright.verbs",
    "explain_case": "tilewright.verbs",
    "optimize": "tilewright.verbs",
    "optimize_case": "tilewright.verbs",
    "profile": "tilewright.profiling.block",
    "sql": "tilewright.verbs.questions",
}


def __getattr__(name: str) -> Any:
    """Public names are loaded when first used, so that importing the package stays cheap."""
    from importlib import import_module

    if name == "functional":
        return import_module("tilewright.functional")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
