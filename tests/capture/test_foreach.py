"""Operators over lists: each tensor's part is a kernel's, with the values and gradients of float64."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.backend import backend, recording
from tilewright.capture.decompositions import by_tensor
from tilewright.measure.truth.contract import compare

SHAPES = ((5, 7), (33,), (2, 3, 4))
BY_LIBRARY = ("aten._foreach_lgamma.default", "aten._foreach_powsum.Scalar", "aten._foreach_mm.default")
"""List operators that no generated kernel computes, not even for one tensor."""


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.rand(shape, generator=draw) * 0.8 + 0.1).to(dtype) for shape in SHAPES]


def arguments(operator: Any) -> list[Any]:
    """An argument for each that the schema wants."""
    made = {"List[Tensor]": tensors(2), "Tensor": torch.tensor(1.5), "number": 1.5, "int": 2}
    given = []
    for place, argument in enumerate(operator._schema.arguments):
        if place and not argument.has_default_value():
            given.append(made.get(str(argument.type), [1.5, 2.0, 0.5]))
    return [1.5, tensors(2)] if "ScalarAndTensor" in str(operator) else [tensors(1), *given]


def wide(value: Any) -> Any:
    if isinstance(value, list):
        return [wide(one) for one in value]
    return value.double() if isinstance(value, Tensor) else value


def test_every_list_operator_is_one_call_for_each_tensor() -> None:
    chosen = {op: arguments(op) for op in by_tensor() if str(op) not in BY_LIBRARY}
    assert len(chosen) > 60

    def function(given: list[list[Any]]) -> list[Sequence[Tensor]]:
        return [operator(*each) for operator, each in zip(chosen, given, strict=True)]

    given = list(chosen.values())
    with recording() as record:
        results = torch.compile(function, backend=backend)(given)
    assert not record.fallbacks and record.graphs[0].executable.kernels
    assert not [node for node in record.graphs[0].plan.graph.nodes if "_foreach" in str(node.target)]
    for name, mine, eager, true in zip(chosen, results, function(given), function(wide(given)), strict=True):
        for parts in zip(mine, eager, true, strict=True):
            assert compare(*parts).ok, name


def update(xs: list[Tensor], ys: list[Tensor]) -> Tensor:
    """Without `_foreach_addcdiv`, whose gradient fails in PyTorch 2.13."""
    a = torch._foreach_mul(torch._foreach_add(xs, ys, alpha=2), 0.5)
    b = torch._foreach_addcmul(a, xs, ys, value=0.1)
    c = torch._foreach_lerp(torch._foreach_sqrt(b), torch._foreach_div(a, ys), 0.3)
    return torch.stack([x.square().sum() for x in c]).sum()


def test_gradients_of_lists() -> None:
    def gradients(function: Any, dtype: torch.dtype) -> Sequence[Tensor]:
        leaves = [x.requires_grad_() for seed in (1, 2) for x in tensors(seed, dtype)]
        return torch.autograd.grad(function(leaves[:3], leaves[3:]), leaves)

    with recording() as record:
        mine = gradients(torch.compile(update, backend=backend), torch.float32)
    assert not record.fallbacks and all(graph.executable.kernels for graph in record.graphs)
    for parts in zip(mine, gradients(update, torch.float32), gradients(update, torch.float64), strict=True):
        assert compare(*parts).ok


def test_an_optimizers_step_has_a_kernel_for_each_parameter() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 5))
    models = [model, copy.deepcopy(model), copy.deepcopy(model).double()]
    steps = []
    for one in models:
        for place, parameter in enumerate(one.parameters()):
            torch.manual_seed(place)
            parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
        # AdamW traced by Dynamo raises its betas to powers in fp32, with an error of its own.
        steps.append(torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True).step)
    with recording() as record:
        compiled = torch.compile(steps[0], backend=backend)
        for _ in range(3):
            for step in (compiled, *steps[1:]):
                step()
    assert not record.fallbacks
    for graph in record.graphs:
        assert len(graph.executable.kernels) >= len(list(model.parameters()))
        assert not [node for node in graph.plan.graph.nodes if "_foreach" in str(node.target)]
    for parts in zip(*(one.parameters() for one in models), strict=True):
        assert compare(*(part.detach() for part in parts)).ok
