"""Arguments of another kind than a function takes: the error names the function and the argument."""

import re
from typing import Any

import pytest
import torch

from tilewright import functional

X = torch.randn(4, 8)
Q = torch.randn(1, 2, 16, 16)
WEIGHT = torch.randn(5, 8)
CLASSES = torch.zeros(4, dtype=torch.long)
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("add_layer_norm", {"x": X, "residual": X, "weight": X[0], "bias": X[0], "eps": 1e-5}),
    ("add_rms_norm", {"x": X, "residual": X, "weight": X[0], "eps": 1e-5}),
    ("attention", {"q": Q, "k": Q, "v": Q, "scale": 1.0, "softcap": 0.0, "dropout_p": 0.0}),
    ("cross_entropy", {"logits": X, "target": CLASSES, "ignore_index": -1, "label_smoothing": 0.1, "z_loss": 0.1}),
    ("dropout_add", {"x": X, "residual": X, "p": 0.5}),
    ("geglu", {"gate": X, "up": X}),
    ("gelu", {"x": X}),
    ("layer_norm", {"x": X, "weight": X[0], "bias": X[0], "eps": 1e-5}),
    ("linear_cross_entropy", {"x": X, "weight": WEIGHT, "target": CLASSES, "ignore_index": -1, "z_loss": 0.1}),
    ("linear_gelu", {"x": X, "weight": WEIGHT, "bias": WEIGHT[:, 0]}),
    ("linear_dropout_add", {"x": X, "weight": WEIGHT, "bias": WEIGHT[:, 0], "residual": X[:, :5], "p": 0.5}),
    ("log_softmax", {"x": X, "dim": 0}),
    ("rms_norm", {"x": X, "weight": X[0], "eps": 1e-5}),
    ("silu", {"x": X}),
    ("softmax", {"x": X, "dim": 0}),
    ("swiglu", {"gate": X, "up": X}),
    ("weighted_sum", {"x": X, "w": X[0]}),
    ("window_attention", {"q": Q, "k": Q, "v": Q, "mask": Q, "scale": 1.0}),
]


@pytest.mark.parametrize(("name", "arguments"), CALLS, ids=[name for name, _ in CALLS])
def test_an_argument_of_another_kind_is_named(name: str, arguments: dict[str, Any]) -> None:
    function = getattr(functional, name)
    function(**arguments)
    for wrong in arguments:
        with pytest.raises(TypeError, match=rf"^{name} takes a (tensor|number|whole number) for {wrong}, not str$"):
            function(**arguments | {wrong: "abc"})


def named(value: object) -> str:
    """The id of a test: the wrong arguments, without their random values."""
    return "-".join(value) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("attention", {"window": 4}, "a pair (left, right) for window, not 4"),
        ("attention", {"window": (1, 2, 3)}, "a pair (left, right) for window, not (1, 2, 3)"),
        ("attention", {"window": (1.5, None)}, "a whole number for window's left side, not float"),
        ("cross_entropy", {"ignore_index": None}, "a number for ignore_index, not None"),
        ("cross_entropy", {"label_smoothing": 2.0}, "label_smoothing in [0, 1], not 2.0"),
        ("cross_entropy", {"reduction": "avg"}, "one of mean, sum, none for reduction, not 'avg'"),
        ("linear_cross_entropy", {"reduction": "none"}, "one of mean, sum for reduction, not 'none'"),
        ("linear_cross_entropy", {"z_loss": float("nan")}, "z_loss of at least 0, not nan"),
        ("cross_entropy", {"target": CLASSES[:2]}, "logits [N, C], C at least 1, and target [N], not [4, 8] and [2]"),
        ("cross_entropy", {"logits": X[:, :0]}, "logits [N, C], C at least 1"),
        ("cross_entropy", {"target": CLASSES.float()}, "floating-point logits and an integer target"),
        ("dropout_add", {"p": 1.5}, "a probability p in [0, 1], not 1.5"),
        ("dropout_add", {"x": X.long(), "residual": X.long()}, "floating-point tensors, not torch.int64"),
        ("dropout_add", {"residual": X[0]}, "x and residual of one shape, dtype and device, not (4, 8)"),
        ("gelu", {"x": X.int()}, "floating-point tensors, not torch.int32"),
        ("swiglu", {"up": X[:, 1:]}, "gate and up of one shape, dtype and device, not (4, 8)"),
        ("linear_cross_entropy", {"weight": WEIGHT[:, :4]}, "x [..., hidden], weight [vocabulary, hidden]"),
        ("linear_cross_entropy", {"weight": WEIGHT.bfloat16()}, "x and weight of one floating-point dtype and int64"),
        ("linear_cross_entropy", {"label_smoothing": 2.0}, "label_smoothing in [0, 1], not 2"),
        ("linear_gelu", {"bias": WEIGHT[:4, 0]}, "x [..., in], weight [out, in] and bias [out], not [4, 8]"),
        ("linear_gelu", {"weight": WEIGHT.bfloat16()}, "tensors of one floating-point dtype on one device"),
        ("linear_dropout_add", {"residual": X[:3, :5]}, "a residual like its result, [4, 5] torch.float32"),
        ("linear_dropout_add", {"p": 1.5}, "a probability p in [0, 1], not 1.5"),
        ("rms_norm", {"x": X.int()}, "a tensor [..., columns] of "),
        ("weighted_sum", {"w": X[0, 1:]}, "x[..., D] and w[D] of one dtype and device, not (4, 8)"),
        ("weighted_sum", {"w": X[0].half()}, "x[..., D] and w[D] of one dtype and device, not (4, 8) torch.float32"),
        ("weighted_sum", {"x": X.long(), "w": X[0].long()}, "floating-point tensors, not torch.int64"),
        ("window_attention", {"mask": torch.ones(3, 3)}, "mask [M, H or 1, Sq, Sk], here [M, 2 or 1, 16, 16]"),
    ],
    ids=named,
)
def test_a_value_that_does_not_fit_is_said_with_what_is_allowed(name: str, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(f"{name} takes {said}")):
        getattr(functional, name)(**dict(CALLS)[name] | wrong)


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("dropout_add", {"activation": "relu"}, "activations none, gelu, gelu_tanh, silu, not 'relu'"),
        ("gelu", {"approximate": "erf"}, 'approximate is "none" or "tanh", not \'erf\''),
        ("linear_gelu", {"approximate": "erf"}, "linear_gelu knows the approximations none, tanh, not 'erf'"),
        ("layer_norm", {"weight": X[0, 1:]}, "layer_norm: weight [7] torch.float32 does not fit x [4, 8]"),
        ("layer_norm", {"bias": X[0].half()}, "layer_norm: a bias needs a weight of its dtype"),
        ("layer_norm", {"weight": X[0].to("meta")}, "layer_norm: x is on cpu, another argument on meta"),
        ("add_rms_norm", {"residual": X[:, 1:]}, "residual [4, 7] torch.float32 must be as x, [4, 8] torch.float32"),
    ],
    ids=named,
)
def test_another_value_that_does_not_fit(name: str, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        getattr(functional, name)(**dict(CALLS)[name] | wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_an_rms_norm_without_an_epsilon_is_pytorch_s(dtype: torch.dtype) -> None:
    # So small that the epsilon decides the result.
    x = torch.full((1, 4), 1e-4, dtype=dtype)
    torch.testing.assert_close(functional.rms_norm(x), torch.nn.functional.rms_norm(x, (4,)))
    torch.testing.assert_close(functional.add_rms_norm(x, x)[0], torch.nn.functional.rms_norm(x + x, (4,)))
