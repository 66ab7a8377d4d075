"""PyTorch's own check of each operator: its schema, its shapes without memory, and its gradient under tracing."""

from typing import Any

import pytest
import torch

from tests.kernels.registered import all_operators

all_operators()
Arguments = tuple[str, tuple[Any, ...]]
"""An operator and what it is called with."""


def drawn(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape or (3, 5)).requires_grad_(grad)


def normed(centered: bool, vectors: int) -> list[Arguments]:
    """Arguments of the norms and of their gradient; `vectors`: how many of weight and bias are given."""
    x, residual = drawn(3, 5, 8), drawn(3, 5, 8)
    weight, bias = [*(drawn(8) for _ in range(vectors)), None, None][:2]
    _, mean, rstd = torch.ops.tilewright.norm(x.detach(), weight, bias, 1e-5, centered)
    plain = (drawn(3, 5, 8, grad=False), x.detach(), residual.detach(), weight if weight is None else weight.detach())
    return [
        ("norm", (x, weight, bias, 1e-5, centered)),
        ("add_norm", (x, residual, weight, bias, 1e-5, centered)),
        ("norm_backward", (*plain, bias is not None, mean, rstd, centered)),
    ]


KEYS, ORDER = torch.tensor([4, 0, 4, 1, 0, 3, 3, 3, 2, 1, 0, 4], dtype=torch.int32).sort(stable=True)
BOUNDS = torch.searchsorted(KEYS, torch.arange(6, dtype=torch.int32))
PLAIN, ROW_OF_3 = drawn(grad=False), torch.tensor([[1, 0, 1]]).expand(4, 3)
TARGETS = torch.tensor([0, 8, -100, 3, 2, 1, 0, 4, 8, -100, 7])
WIDE = drawn(11, 5, grad=False), drawn(9, 5, grad=False)
CHECKED: list[Arguments] = [
    ("activation", (drawn(), "gelu_tanh")),
    ("activation_backward", (PLAIN, PLAIN, "gelu")),
    ("gated_activation", (drawn(), drawn(5, 3).t(), "gelu")),
    ("gated_activation_backward", (PLAIN, PLAIN, PLAIN, "silu")),
    ("softmax", (drawn(2, 3, 5), True)),
    ("softmax", (drawn(2, 3, 5, grad=False).transpose(0, 2), False)),
    ("softmax_backward", (PLAIN.softmax(-1), PLAIN, False)),
    *(argument for given in ((True, 2), (False, 1)) for argument in normed(*given)),
    *(
        ("cross_entropy", (drawn(6, 9), torch.tensor([0, 8, -100, 3, 2, 1]), -100, 0.1, 1e-3, how, False, "auto"))
        for how in ("mean", "none")
    ),
    # With outcomes that are certain, since it runs several times.
    *(("dropout_add", (drawn(), drawn(), p, kind, 16)) for p, kind in ((0.0, "gelu"), (1.0, "none"))),
    ("dropout_add_backward", (PLAIN, PLAIN, PLAIN > 0, 0.5, "gelu", 16)),
    ("dropout_add_backward", (PLAIN, None, PLAIN > 0, 0.5, "none", 16)),
    *(("weighted_sum", (drawn(5, 8, grad=x), drawn(8, grad=w))) for x, w in ((True, True), (False, True))),
    ("weighted_sum_backward", (drawn(3, grad=False), PLAIN, drawn(5, grad=False), True, False)),
    ("linear_gelu", (drawn(5, 16), drawn(8, 16), drawn(8), "tanh", True)),
    ("linear_gelu", (drawn(5, 16, grad=False), drawn(8, 16, grad=False), None, "none", False)),
    *(
        (
            "convolution",
            (drawn(2, 3, 7, 5, grad=False), drawn(4, 3, 3, 2, grad=False), [2, 1], [1, 0], [1, 2], last, 32),
        )
        for last in (False, True)
    ),
    ("product", (drawn(5, 16), drawn(16, 8), drawn(8))),
    ("product", (drawn(3, 5, 16), drawn(3, 8, 16).mT, None)),
    ("linear_cross_entropy", (drawn(11, 5), drawn(9, 5), TARGETS, -100, 0.1, 0.01, True, [True, True])),
    ("linear_cross_entropy_backward", (torch.tensor(2.0), *WIDE, TARGETS, -100, 0.1, 0.01, True, [True, False])),
    ("scale_gradient_", (torch.randn(3), torch.tensor(2.0))),
    ("sorted_bounds", (KEYS, 5)),
    ("embedding_sums", (drawn(4, 3, 6, grad=False), KEYS, ORDER, BOUNDS, 5, -1)),
    ("add_embedding_sums_", (drawn(5, 6, grad=False), drawn(4, 3, 6, grad=False), KEYS, ORDER, BOUNDS, -1)),
    ("row_extremes", (drawn(4, 6, grad=False), KEYS, ORDER % 4, BOUNDS, 5, True, 0.0, False)),
    ("matching_sums", (drawn(4, 6, grad=False), drawn(5, 6, grad=False), None, KEYS, ORDER % 4, BOUNDS)),
    ("matching_sums", (*[drawn(4, 6, grad=False)] * 3, KEYS.clamp(max=3), ORDER % 4, BOUNDS[:5])),
    ("scatter_sums", (drawn(4, 3, grad=False), ROW_OF_3, 5)),
]


@pytest.mark.parametrize("number", range(len(CHECKED)), ids=lambda number: f"{CHECKED[number][0]} {number}")
def test_pytorchs_check_of_operators(number: int) -> None:
    name, arguments = CHECKED[number]
    torch.library.opcheck(getattr(torch.ops.tilewright, name).default, arguments)


def test_what_draws_is_known_to() -> None:
    """Its mask differs from run to run, so that only schema, shapes and autograd can be checked."""
    for name, operands in (("dropout_add", (drawn(), drawn(), 0.5, "gelu", 16)),):
        operator = getattr(torch.ops.tilewright, name).default
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(operator, operands, test_utils=tests)
        assert torch.Tag.nondeterministic_seeded in operator.tags
