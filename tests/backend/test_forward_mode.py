"""Forward-mode differentiation through a compiled function: eager's tangent, or an error; never none."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

from tests.backend.compiling import assert_same, compiled, kernels
from tilewright import functional
from tilewright.backend import recording


def function(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm((x.sin() * x).exp(), (8,))


@pytest.mark.parametrize("is_compiled_before", [False, True])
def test_the_tangent_is_eagers(is_compiled_before: bool) -> None:
    x, tangent = torch.randn(2, 5, 8)
    run = compiled(function, dynamic=False)
    with recording() as record:
        if is_compiled_before:
            run(x)
        with forward_ad.dual_level():
            primal, found = forward_ad.unpack_dual(run(forward_ad.make_dual(x, tangent)))
            expected = forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent)))
            assert found is not None
            assert_same((primal, found), tuple(expected))
            # What carries no tangent runs the kernels.
            assert forward_ad.unpack_dual(run(x)).tangent is None
    assert kernels(record)
    assert_same(run(x), function(x))


def test_training_raises_pytorchs_error() -> None:
    x, tangent = torch.randn(2, 5, 8)
    x.requires_grad_()
    run = compiled(function, dynamic=False)
    run(x)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        run(forward_ad.make_dual(x, tangent))


def test_what_has_no_tangent_says_so() -> None:
    x, tangent = torch.randn(2, 5, 8)
    run = compiled(lambda x: functional.softmax(x * 2, -1).sin(), dynamic=False)
    run(x)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"tilewright\.\w+.*has no tangent"):
        run(forward_ad.make_dual(x, tangent))
