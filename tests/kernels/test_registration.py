"""What all operators have in common: derivatives that they do not have are refused, not dropped."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward

from tilewright import functional


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
