"""Which integers of a generated Triton kernel take 32 bits: those that cannot be larger."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tests.passes.graphs import aten
from tilewright.emit.triton import emit_triton
from tilewright.emit.triton_indices import ranges_of
from tilewright.hardware.target import target_named
from tilewright.loops.nest import Nest
from tilewright.passes.fusion import fuse


def nest_of(function: Callable[..., Any], *inputs: torch.Tensor) -> Nest:
    return fuse(aten(function, *inputs), "forward", target_named("h200")).regions[-1].lowered.nest


def test_places_of_a_pool_take_32_bits() -> None:
    text = emit_triton(nest_of(lambda x: F.avg_pool2d(x, 3, 2, 1), torch.randn(2, 3, 9, 9)))
    assert "int64" not in text


def test_what_may_overflow_takes_64() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        i = torch.arange(70_000)
        return x + i * i

    nest = nest_of(program, torch.zeros(70_000, dtype=torch.int64))
    ranges = ranges_of(nest)
    assert (0, 69_999**2) in [ranges[i] for i, step in enumerate(nest.steps) if step.name == "mul" and i in ranges]
    text = emit_triton(nest)
    assert ".to(tl.int64) * " in text


def test_indices_from_memory_take_the_bits_of_memory() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.int64) + 1

    assert "tl.int32" in emit_triton(nest_of(program, torch.zeros(600, dtype=torch.int16)))
    wide = nest_of(lambda x: x + 1, torch.zeros(600, dtype=torch.int64))
    assert not [i for i in ranges_of(wide) if wide.steps[i].name in ("load", "add")]
