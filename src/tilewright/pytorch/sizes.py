"""Sizes that are symbols: fake tensors that have them, and their expressions as operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch


def fakes_in(symbols: Any) -> AbstractContextManager[Any]:
    """Inside, operators compute on fake tensors, whose sizes that depend on data are of this `ShapeEnv`."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols)


def size_from_data(symbols: Any) -> torch.SymInt:
    """A new size of this `ShapeEnv`, known only when the program runs: 0 or more."""
    from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

    made: torch.SymInt = symbols.create_unbacked_symint()
    _constrain_range_for_size(made)
    return made


def computed(expression: Any, values: Mapping[Any, Any]) -> Any:
    """An expression of symbols with Python's operators on their values, which may be proxies of a graph."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    return sympy_interp(PythonReferenceAnalysis, dict(values), expression)


def as_python(expression: Any) -> str:
    """An expression of symbols in Python's syntax."""
    from torch.utils._sympy.printers import PythonPrinter

    printed: str = PythonPrinter().doprint(expression)
    return printed


def conditions_from(folder: str, tensors: Iterable[torch.Tensor]) -> list[str]:
    """What code in this folder asked about symbolic sizes, and where: `s0 <= 768 at /…/embeddings.py:132 in …`. Each is
    a condition of the captured program, which is captured again where it does not hold. Left out is whether a size is
    1, which strides depend on."""
    first: Any = next((size for x in tensors for size in x.shape if isinstance(size, torch.SymInt)), None)
    guards = [] if first is None else first.node.shape_env.guards
    found = ((guard.expr, str(guard.sloc.framework_loc)) for guard in guards if guard.expr.args[1:] != (1,))
    return [f"{expression} at {place}" for expression, place in found if folder in place]
