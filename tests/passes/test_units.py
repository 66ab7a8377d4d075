"""Operators without the views between them: who reads whom, what must be in memory, what would be a cycle."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor, fx

from tests.passes.graphs import aten
from tilewright import functional
from tilewright.hardware.target import target_named
from tilewright.passes.units import (
    Reachability,
    is_fusible,
    whose_kernel,
)

X = torch.zeros(4, 6)


def test_why_a_node_cannot_be_part_of_a_kernel() -> None:
    def mixed(x: Tensor, w: Tensor, i: Tensor) -> object:
        return x @ w, torch.rand_like(x), torch.fft.fft(x), x[i], x.cumsum(0), x.exp(), x[:0].exp()

    found = aten(mixed, X, torch.zeros(6, 6), torch.zeros(2, dtype=torch.int64))
    reasons = {n.name: is_fusible(n) for n in found.nodes if n.op == "call_function"}
    assert reasons["exp"] is None
    assert reasons["exp_1"] == "a tensor is empty"
    assert reasons["mm"] == "aten.mm.default is a library call"
    assert reasons["rand_like"] == "aten.rand_like.default is a library call"
    assert reasons["cumsum"] == "aten.cumsum.default is a library call"
    assert reasons["index"] is None
    assert reasons["_fft_r2c"] == "aten._fft_r2c.default has no row in the operator table"


def test_whose_kernel_runs_for_an_operator_of_tilewrights() -> None:
    def reason(x: Tensor, device: str) -> str | None:
        (node,) = (n for n in aten(lambda x: functional.layer_norm(x), x).nodes if "norm" in str(n.target))
        return whose_kernel(node, target_named(device))

    by_pytorch = "tilewright.norm.default is computed by PyTorch's operators: its hand-written kernel is "
    assert reason(X, "cpu") == by_pytorch + "for GPUs"
    assert reason(X, "h200") == "tilewright.norm.default runs tilewright's own hand-written kernel"
    assert reason(X.double(), "h200") == by_pytorch + "not for float64"


def test_cycles_are_those_that_a_walk_finds() -> None:
    def braided(x: Tensor, w: Tensor) -> Tensor:
        a = x.exp()
        b = a.t() @ w
        c = (b.t() * a).sin()
        d = c @ w
        return (d + a).sum(0) * c.t().sum(1)

    found = aten(braided, torch.zeros(4, 4), torch.zeros(4, 4))
    reach = Reachability(found)
    operators = [n for n in found.nodes if n.op == "call_function" and not n.target.__name__.startswith("t.")]
    pairs = list(combinations(operators, 2))
    assert {reach.makes_cycle(pair) for pair in pairs} == {True, False}
    for first, second in pairs:
        assert reach.makes_cycle((first, second)) == _leaves_and_returns(first, second), (first, second)


def test_what_was_merged_counts_as_one() -> None:
    def crossed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a, d = x.exp(), y.cos()
        return a.sin(), d.tanh()

    found = aten(crossed, X, X)
    a, c, d, b = ({n.name: n for n in found.nodes}[name] for name in ("exp", "sin", "cos", "tanh"))
    reach = Reachability(found)
    assert not reach.makes_cycle((a, b)) and not reach.makes_cycle((c, d))
    # a feeds c and d feeds b: kernels {a, b} and {c, d} would wait for each other.
    reach.merge((a, b))
    assert reach.makes_cycle((c, d))


def test_of_two_draws_the_first_comes_first() -> None:
    def drawn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a = x.exp()
        first, second = torch.rand_like(a), torch.rand_like(y)
        return first, a * second

    found = aten(drawn, X, X)
    node = {n.name: n for n in found.nodes}
    # One kernel of exp and mul would have to run before the first draw and after the second.
    assert Reachability(found).makes_cycle((node["exp"], node["mul"]))


def _leaves_and_returns(first: fx.Node, second: fx.Node) -> bool:
    """Whether a path from `first` to `second` runs through another operator (views belong to their operand)."""
    todo = [(user, False) for user in first.users]
    while todo:
        node, outside = todo.pop()
        if node is second:
            if outside:
                return True
            continue
        is_own_view = str(node.target).startswith("aten.t.") and not outside
        todo += [(user, not is_own_view) for user in node.users]
    return False
