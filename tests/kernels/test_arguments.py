"""Arguments of another kind than a function takes: the error names the function and the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewright import functional

X = torch.randn(4, 8)
Q = torch.randn(1, 2, 16, 16)
WEIGHT = torch.randn(5, 8)
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("add_layer_norm", {"x": X, "residual": X, "weight": X[0], "bias": X[0], "eps": 1e-5}),
    ("add_rms_norm", {"x": X, "residual": X, "weight": X[0], "eps": 1e-5}),
    ("attention", {"q": Q, "k": Q, "v": Q, "scale": 1.0, "softcap": 0.0, "dropout_p": 0.0}),
    ("dropout_add", {"x": X, "residual": X}),
    ("embedding", {"indices": torch.zeros(3, dtype=torch.long), "weight": X}),
    ("geglu", {"gate": X, "up": X}),
    ("gelu", {"x": X}),
    ("layer_norm", {"x": X, "weight": X[0], "bias": X[0], "eps": 1e-5}),
    ("linear_gelu", {"x": X, "weight": WEIGHT, "bias": WEIGHT[:, 0]}),
    ("linear_dropout_add", {"x": X, "weight": WEIGHT, "bias": WEIGHT[:, 0], "residual": X[:, :5]}),
    ("log_softmax", {"x": X}),
    ("rms_norm", {"x": X, "weight": X[0], "eps": 1e-5}),
    ("silu", {"x": X}),
    ("softmax", {"x": X}),
    ("swiglu", {"gate": X, "up": X}),
]


@pytest.mark.parametrize(("name", "arguments"), CALLS, ids=[name for name, _ in CALLS])
def test_an_argument_of_another_kind_is_named(name: str, arguments: dict[str, Any]) -> None:
    function = getattr(functional, name)
    function(**arguments)
    for wrong in arguments:
        with pytest.raises(TypeError, match=rf"^{name} takes a (tensor|number) for {wrong}, not str$"):
            function(**arguments | {wrong: "abc"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_an_rms_norm_without_an_epsilon_is_pytorch_s(dtype: torch.dtype) -> None:
    # So small that the epsilon decides the result.
    x = torch.full((1, 4), 1e-4, dtype=dtype)
    torch.testing.assert_close(functional.rms_norm(x), torch.nn.functional.rms_norm(x, (4,)))
    torch.testing.assert_close(functional.add_rms_norm(x, x)[0], torch.nn.functional.rms_norm(x + x, (4,)))
