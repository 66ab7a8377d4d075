"""Selects programs of a launch and records their accesses in a separate process (`interpreted`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tilewright.anatomy.capture import TritonLaunch
from tilewright.records.launch_record import Access, Grid, ProgramAccesses

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
    command = [sys.executable, "-m", "tilewright.anatomy.interpreted"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(launches),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [f"the interpreter took more than {SECONDS} s"] * len(variants)
    if done.returncode:
        return [f"the interpreter failed: {done.stderr.strip().splitlines()[-1:]}"] * len(variants)
    answers = json.loads(done.stdout.rstrip().rsplit("\n", 1)[-1])
    return [answer.get("error") or tuple(map(_walk, answer["walks"])) for answer in answers]


def _launch(captured: TritonLaunch, changes: Mapping[str, Any], grid: Grid, programs: Sequence[Grid]) -> dict[str, Any]:
    function = captured.function.fn
    return {
        "module": function.__module__,
        "file": str(Path(function.__code__.co_filename).resolve()),
        "kernel": function.__name__,
        "arguments": {name: _argument(name, value) for name, value in {**captured.arguments, **changes}.items()},
        "grid": grid,
        "programs": programs,
    }


def _argument(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return {"kind": "tensor", **_layout(value)}
    if isinstance(getattr(value, "base", None), torch.Tensor) and hasattr(value, "block_shape"):
        return {"kind": "descriptor", "block": list(value.block_shape), **_layout(value.base)}
    if value is None or isinstance(value, bool | int | float | str):
        return {"kind": "value", "value": value}
    if type(value).__module__.startswith("triton.language") and hasattr(value, "primitive_bitwidth"):
        return {"kind": "dtype", "value": str(value) if str(value).startswith(("float", "int")) else value.name}
    raise TypeError(f"the argument {name} of type {type(value).__name__} cannot be passed to the interpreter")


def _layout(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }


def _walk(answer: Mapping[str, Any]) -> ProgramAccesses:
    accesses = tuple(
        Access(
            a["operand"],
            a["direction"],
            tuple((first, last) for first, last in a["ranges"]),
            a["elements"],
            a["lanes"],
            tuple(a["shape"]),
        )
        for a in answer["accesses"]
    )
    x, y, z = answer["program"]
    return ProgramAccesses((x, y, z), accesses)
