"""Axes: what views and unification make of dimensions, against the enumeration of every index."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.loops.interpreter import capture, run
from tilewright.loops.lower import strides_of
from tilewright.operators.axes import Axis, Group, Unfusable, group, leaves, regroup, size, unify

FACTORS = st.lists(st.sampled_from([2, 3, 2, 5]), min_size=1, max_size=5)


@st.composite
def two_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of one list of elements: the same prime factors, grouped in two ways, with ones between."""
    factors = draw(FACTORS)

    def grouped() -> tuple[int, ...]:
        shape = [1]
        for factor in factors:
            if draw(st.booleans()):
                shape.append(factor)
            else:
                shape[-1] *= factor
        return tuple(shape)

    return grouped(), grouped()


def contiguous(shape: Sequence[int]) -> list[int]:
    return [prod(shape[i + 1 :]) for i in range(len(shape))]


def positions(dims: Sequence[Group], shape: Sequence[int], axes: Sequence[Axis]) -> Iterator[int]:
    """Where each point of `axes` is in a contiguous tensor of `shape` whose dimensions are `dims`."""
    strides = strides_of(dims, contiguous(shape))
    for point in itertools.product(*(range(axis.extent) for axis in axes)):
        yield sum(i * strides.get(axis, 0) for i, axis in zip(point, axes, strict=True))


@given(two_shapes())
@settings(deadline=None, derandomize=True)
def test_a_view_keeps_every_element_in_its_place(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    old, new = shapes
    groups = tuple(group(n) for n in old)
    viewed = regroup(groups, new)
    assert tuple(size(g) for g in viewed) == new
    axes = leaves(axis for g in groups for axis in g)
    assert list(positions(viewed, new, axes)) == list(positions(groups, old, axes)) == list(range(prod(old)))


@given(two_shapes())
@settings(deadline=None, derandomize=True)
def test_unified_groups_run_over_the_same_axes(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    left, right = (tuple(Axis(n) for n in shape if n > 1) for shape in shapes)
    unify(left, right)
    assert leaves(left) == leaves(right)
    for axes in (left, right):
        assert all(size(leaves((axis,))) == axis.extent for axis in axes)
    # Once more changes nothing.
    before = leaves(left)
    unify(left, right)
    assert leaves(left) == before


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda: unify((Axis(4),), (Axis(6),)), "axes of 4 and 6 elements do not refine each other"),
        (lambda: unify((Axis(4), Axis(2)), (Axis(4),)), "groups of different size meet"),
        (lambda: regroup([group(4), group(6)], [6, 4]), "a view cuts an axis of 6 elements at 4"),
        (lambda: regroup([group(4)], [8]), "a view asks for more elements than there are"),
        (lambda: regroup([group(4)], [2]), "a view asks for fewer elements than there are"),
    ],
)
def test_what_does_not_fit_is_refused(act: object, reason: str) -> None:
    with pytest.raises(Unfusable, match=reason):
        act()  # type: ignore[operator]


STEPS = ["view", "permute", "unsqueeze", "plus", "largest", "sum", "mean"]


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[str, int]]]:
    factors = draw(FACTORS)
    steps = draw(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5)), min_size=1, max_size=6))
    return tuple(factors), steps


def follow(x: Tensor, steps: Sequence[tuple[str, int]]) -> Tensor:
    """Views, broadcast sums and reductions, in the order given, between two operators that compute."""
    value = x.exp()
    for step, number in steps:
        dim = number % max(value.dim(), 1)
        if step == "view":
            value = value.reshape(*value.shape[:dim], -1)
        elif step == "permute":
            order = list(range(value.dim()))
            value = value.permute(order[dim:] + order[:dim])
        elif step == "unsqueeze":
            value = value.unsqueeze(dim)
        elif step == "plus":
            value = value + 0.5 * value.neg()
        elif step == "largest" and value.dim():
            value = value / value.amax(dim, keepdim=True)
        elif step == "sum" and value.dim():
            value = value.sum(dim)
        elif step == "mean" and value.dim():
            value = value - value.mean(dim, keepdim=True)
    return value.tanh()


@given(chains())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_any_chain_that_has_a_nest_computes_what_eager_does(
    chain: tuple[tuple[int, ...], list[tuple[str, int]]],
) -> None:
    shape, steps = chain
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))
    try:
        captured = capture(lambda x: follow(x, steps), x)
    except Unfusable:
        return
    (result,) = run(captured, [x])
    torch.testing.assert_close(result, follow(x, steps), rtol=1e-11, atol=1e-11)
