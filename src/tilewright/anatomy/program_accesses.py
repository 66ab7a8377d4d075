"""Selects programs of a launch and records their accesses in a separate process (`interpreted`)."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tilewright.anatomy.capture import TritonLaunch
from tilewright.anatomy.interpreted import Described, InterpretedLaunch
from tilewright.records.launch_record import Grid, ProgramAccesses
from tilewright.records.recipe import Layout

SECONDS = 60
"""Time limit of the interpreter."""


def sampled(grid: Grid) -> list[Grid]:
    """The first program, its neighbour along each axis of the grid, and the last two.

    >>> sampled((63, 1, 1))
    [(0, 0, 0), (1, 0, 0), (61, 0, 0), (62, 0, 0)]
    """
    x, y, z = grid
    chosen = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (x - 2, y - 1, z - 1), (x - 1, y - 1, z - 1)]
    return [p for p in dict.fromkeys(chosen) if all(0 <= i < n for i, n in zip(p, grid, strict=True))]


def program_accesses(
    captured: TritonLaunch, variants: Sequence[tuple[Mapping[str, Any], Grid, Sequence[Grid]]]
) -> list[tuple[ProgramAccesses, ...] | str]:
    """For each variant (changed constants, grid, programs) the programs' accesses, or why there are none."""
    if captured.function.is_gluon():
        return ["a Gluon kernel cannot be interpreted"] * len(variants)
    try:
        launches = [_launch(captured, *variant) for variant in variants]
    except TypeError as error:
        return [str(error)] * len(variants)
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.NamedTemporaryFile() as file:
        pickle.dump(launches, file)
        file.flush()
        command = [sys.executable, "-m", "tilewright.anatomy.interpreted", file.name]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False
            )
        except subprocess.TimeoutExpired:
            return [f"the interpreter took more than {SECONDS} s"] * len(variants)
        if done.returncode:
            return [f"the interpreter failed: {done.stderr.strip().splitlines()[-1:]}"] * len(variants)
        answers: list[tuple[ProgramAccesses, ...] | str] = pickle.loads(Path(file.name).read_bytes())
    return answers


def _launch(
    captured: TritonLaunch, changes: Mapping[str, Any], grid: Grid, programs: Sequence[Grid]
) -> InterpretedLaunch:
    function = captured.function.fn
    return InterpretedLaunch(
        function.__module__,
        str(Path(function.__code__.co_filename).resolve()),
        function.__name__,
        {name: _argument(name, value) for name, value in {**captured.arguments, **changes}.items()},
        grid,
        programs,
    )


def _argument(name: str, value: Any) -> Any:
    """The argument in the form that `InterpretedLaunch` takes; TypeError if it has none."""
    if isinstance(value, torch.Tensor):
        return Layout(tuple(value.shape), tuple(value.stride()), value.dtype, None)
    if isinstance(getattr(value, "base", None), torch.Tensor) and hasattr(value, "block_shape"):
        return Described(_argument(name, value.base), list(value.block_shape))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value).__module__.startswith("triton.language") and hasattr(value, "primitive_bitwidth"):
        return value
    raise TypeError(f"the argument {name} of type {type(value).__name__} cannot be passed to the interpreter")
