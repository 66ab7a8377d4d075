"""Attention backward on Hopper without a GPU: machine code, memory of a program, what is refused."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.kernels.nvcc import assembled
from tilewright.hardware.architectures import INTERPRETER, stated_limits
from tilewright.kernels.attention.hopper import backward as hopper_backward
from tilewright.kernels.attention.hopper.problem import Problem
from tilewright.kernels.attention.request import Request

SHAPES = (*hopper_backward.SHAPES.values(), hopper_backward.SHORT)
BUILDS = (
    (False, torch.bfloat16, True, False),
    (True, torch.float16, True, False),
    (True, torch.bfloat16, False, False),
    (True, torch.bfloat16, False, True),
)
"""Banded, dtype, attended, turns."""
H200 = stated_limits("9.0", multiprocessors=132, l2_bytes=60 << 20)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_run_ahead_and_registers_suffice(shape: hopper_backward.BackwardTiles) -> None:
    """The assembler makes matrix instructions wait for each other where it cannot follow the pipeline."""
    for build in BUILDS:
        found = assembled(shape.source, shape.definitions(*build))
        assert found["serialized"] == 0
        # By the warps beside those that multiply, which have 24 registers.
        assert found["spilled"] <= 96


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_programs_fit(shape: hopper_backward.BackwardTiles) -> None:
    assert shape.shared_bytes <= H200.shared_bytes_per_block


def test_arguments_lie_as_the_source_declares_them() -> None:
    assert ctypes.sizeof(Problem) == 136
    assert Problem.queries.offset == 80


def test_the_cpu_is_refused() -> None:
    strides = 64, 64, 64, 1
    request = Request(
        torch.device("cpu"), torch.bfloat16, 1, 1, 1, 1, 1, 64, 64, strides, strides, strides, True, 1.0, None, None
    )
    assert "GPU" in (hopper_backward.supports(request, INTERPRETER) or "")
