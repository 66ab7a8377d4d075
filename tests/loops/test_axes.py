"""Axes: what views, sums of broadcasts and reductions make of dimensions, by what a nest of them computes."""

from collections.abc import Sequence
from math import prod

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.loops.interpreter import capture, run
from tilewright.operators.axes import Unfusable

VIEWS = ["join", "cut high", "cut low", "permute", "unsqueeze", "plus"]
REDUCTIONS = ["largest", "sum", "mean"]
SHAPES = st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=3)
"""Powers of two, all of whose views refine each other."""


def chains(steps: Sequence[str]) -> st.SearchStrategy[list[tuple[str, int]]]:
    """With one sum at most: the second may be of a value and its own transpose, of which there is no nest."""
    chain = st.lists(st.tuples(st.sampled_from(steps), st.integers(0, 5)), min_size=1, max_size=6)
    return chain.filter(lambda chain: [step for step, _ in chain].count("plus") <= 1)


def follow(x: Tensor, y: Tensor, steps: Sequence[tuple[str, int]]) -> Tensor:
    """Views, sums with a value of `y` in those views and reductions, in order, between operators that compute."""
    value, other = x.exp(), y.tanh()
    for step, number in steps:
        dim = number % max(value.dim(), 1)
        before, here, after = value.shape[:dim], value.shape[dim : dim + 1], value.shape[dim + 1 :]
        if step == "join":
            value = value.reshape(*before, -1)
        elif step == "cut high" and prod(here) > 1:
            value = value.reshape(*before, 2, -1, *after)
        elif step == "cut low" and prod(here) > 1:
            value = value.reshape(*before, -1, 2, *after)
        elif step == "permute":
            order = list(range(value.dim()))
            value = value.permute(order[dim:] + order[:dim])
        elif step == "unsqueeze":
            value = value.unsqueeze(dim)
        elif step == "plus" and value.numel() == other.numel():
            value = value + other.reshape(value.shape)
        elif step == "largest" and value.dim():
            value = value / value.amax(dim, keepdim=True)
        elif step == "sum" and value.dim():
            value = value.sum(dim)
        elif step == "mean" and value.dim():
            value = value - value.mean(dim, keepdim=True)
    return value.tanh()


def compare(shape: Sequence[int], steps: Sequence[tuple[str, int]]) -> None:
    """The nest against eager; `y` has the sizes the other way round, so that each cuts the other's axes."""
    generator = torch.Generator().manual_seed(len(shape))
    x, y = (torch.randn(*n, dtype=torch.float64, generator=generator) for n in (shape, shape[::-1]))
    (result,) = run(capture(lambda x, y: follow(x, y, steps), x, y), [x, y])
    torch.testing.assert_close(result, follow(x, y, steps), rtol=1e-11, atol=1e-11)


@given(SHAPES, chains(VIEWS))
@settings(deadline=None, derandomize=True, max_examples=80)
def test_any_chain_of_views_has_a_nest_that_computes_what_eager_does(
    shape: list[int], steps: list[tuple[str, int]]
) -> None:
    compare(shape, steps)


@given(SHAPES, chains(VIEWS + REDUCTIONS))
@settings(deadline=None, derandomize=True, max_examples=80)
def test_any_chain_with_reductions_that_has_a_nest_computes_what_eager_does(
    shape: list[int], steps: list[tuple[str, int]]
) -> None:
    try:
        compare(shape, steps)
    except Unfusable:
        return
