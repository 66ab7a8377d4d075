"""Nests of several sizes as one: its arguments, and what each size gives them."""

import re

import pytest
import torch
import torch.nn.functional as F

from tests.loops.interpreter import capture
from tilewright.loops.nest import Nest, nameless
from tilewright.loops.sizes import filled, of_all_sizes

SIDES = 12, 17, 23, 30


def window(side: int) -> Nest:
    return capture(lambda x: F.max_pool2d(-x, 3, padding=1), torch.randn(2, side, side)).nest


@pytest.mark.parametrize("with_offsets", [True, False])
def test_a_nest_of_all_sizes_becomes_that_of_each(with_offsets: bool) -> None:
    nests = [window(side) for side in SIDES]
    nest, arguments = of_all_sizes(nests, "pooling", with_offsets=with_offsets)
    for number, each in enumerate(map(nameless, nests)):
        found = filled(nest, [values[number] for values in arguments])
        assert (found.rows, found.cols, found.steps, found.stores) == (each.rows, each.cols, each.steps, each.stores)


def test_neighbours_in_a_window_differ_by_a_number_that_the_compiler_sees() -> None:
    nest, _ = of_all_sizes([window(side) for side in SIDES], "pooling", with_offsets=True)
    offsets = [str(step.access.offset) for step in nest.steps if step.access]
    assert len(set(offsets)) == 9
    # Two rows of the window have arguments of their own; the third starts at the element itself.
    assert len({name for text in offsets for name in re.findall(r"n\d+", text)}) == 2
