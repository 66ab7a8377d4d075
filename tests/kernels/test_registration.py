"""Tests for all operators: one graph when compiled, a row in the table, an error for a missing derivative."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward

from tests.gpu.kernels.launching import values_of
from tests.kernels.losses import OPTIONS, targets
from tests.kernels.registered import all_operators
from tilewright import functional
from tilewright.operators.table import row_of, rows


def test_forward_mode_is_refused_where_pytorch_would_drop_it() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(NotImplementedError, match="tilewright's softmax has no forward-mode derivative"):
        torch.func.jvp(functional.softmax, (x,), (torch.ones_like(x),))
    with (
        forward.dual_level(),
        pytest.raises(NotImplementedError, match="tilewright's norm has no forward-mode derivative"),
    ):
        functional.rms_norm(forward.make_dual(x, torch.ones_like(x)))
    assert functional.softmax(x).sum().item() == pytest.approx(3.0)


def test_every_operator_has_its_row_and_every_row_its_operator() -> None:
    names = all_operators()
    assert {name.replace("::", ".") + ".default" for name in names} == {row.name for row in rows().values() if row.own}
    for name in names:
        overload = getattr(torch.ops.tilewright, name.removeprefix("tilewright::")).default
        row = row_of(overload)
        assert row is not None
        # What may be dropped, merged or moved: what neither draws nor writes.
        draws = torch.Tag.nondeterministic_seeded in overload.tags
        assert row.pure == (not draws and not overload._schema.is_mutable)


CLASSES = torch.tensor([0, 8, -100, 3])


def _cross_entropy(options: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    target = targets(torch.empty(4, 9), options.get("ignore_index", -100))
    return lambda x: functional.cross_entropy(x, target, **options)


DROPOUTS = {
    kind: partial(functional.dropout_add, p=0.3, activation=kind) for kind in ("none", "gelu", "gelu_tanh", "silu")
}
CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    **{name: (getattr(functional, name), ((6, 24),)) for name in ("gelu", "silu")},
    **{name: (getattr(functional, name), ((6, 24), (6, 24))) for name in ("swiglu", "geglu")},
    **{f"dropout_add {kind}": (call, ((6, 24), (6, 24))) for kind, call in DROPOUTS.items()},
    **{f"{name} by tanh": (partial(getattr(functional, name), approximate="tanh"), ((6, 24),) * count)
       for name, count in (("gelu", 1), ("geglu", 2))},
    "weighted_sum": (functional.weighted_sum, ((6, 24), (24,))),
    "softmax": (partial(functional.softmax, dim=0), ((6, 24),)),
    "log_softmax": (functional.log_softmax, ((6, 24),)),
    "layer_norm": (functional.layer_norm, ((6, 24), (24,), (24,))),
    "rms_norm": (functional.rms_norm, ((6, 24), (24,))),
    "add_layer_norm": (functional.add_layer_norm, ((6, 24), (6, 24), (24,), (24,))),
    "add_rms_norm": (functional.add_rms_norm, ((6, 24), (6, 24), (24,))),
    **{f"cross_entropy {name}": (_cross_entropy(options), ((4, 9),)) for name, options in OPTIONS.items()},
    "linear_gelu": (functional.linear_gelu, ((5, 24), (8, 24), (8,))),
    "linear_dropout_add": (
        partial(functional.linear_dropout_add, p=0.25), ((5, 24), (8, 24), (8,), (5, 8)),
    ),
    "linear_cross_entropy": (
        lambda x, weight: functional.linear_cross_entropy(x, weight, CLASSES, label_smoothing=0.1), ((4, 5), (9, 5)),
    ),
}  # fmt: skip
ONCE = {
    "gelu": "activation",
    "dropout_add gelu": "dropout_add",
    "weighted_sum": "weighted_sum",
    "softmax": "softmax",
    "rms_norm": "norm",
    "cross_entropy z-loss": "cross_entropy",
}
"""Cases without a second derivative, and what the operator is called."""


def drawn(name: str) -> list[torch.Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in CASES[name][1]]


ALIKE = (
    *("gelu by tanh", "dropout_add none", "dropout_add gelu_tanh", "dropout_add silu", "silu", "log_softmax"),
    *(f"cross_entropy {name}" for name in [*OPTIONS][:-1]),
)
"""Which differ from another case in a number or a name alone."""


@pytest.mark.parametrize("name", [name for name in CASES if name not in ALIKE])
def test_compiled_as_one_graph(name: str) -> None:
    call, inputs = CASES[name][0], drawn(name)
    found = []
    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        found.append(values_of(function, inputs))
    assert all(torch.equal(plain, compiled) for plain, compiled in zip(*found, strict=True))


DRAWING = ("dropout_add", "linear_dropout_add")


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(DRAWING)])
def test_gradients_in_float64_are_slopes(name: str) -> None:
    call, shapes = CASES[name]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("name", ONCE)
def test_a_second_derivative_is_refused(name: str) -> None:
    inputs = drawn(name)
    (gradient, *_) = torch.autograd.grad(CASES[name][0](*inputs).square().sum(), inputs, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"{ONCE[name]}_backward has no second derivative"):
        gradient.sum().backward()


def test_any_leading_dimensions_of_a_weighted_sum() -> None:
    x, w = torch.randn(2, 3, 4), torch.randn(4)
    torch.testing.assert_close(functional.weighted_sum(x, w), x @ w)
    torch.testing.assert_close(functional.weighted_sum(x[0, 0], w), x[0, 0] @ w)
