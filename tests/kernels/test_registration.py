"""What all operators have in common: derivatives that they do not have are refused, not dropped; each has a row."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward

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
        assert row is not None and row.body is None
        # What may be dropped, merged or moved: what neither draws nor writes.
        draws = torch.Tag.nondeterministic_seeded in overload.tags
        assert row.pure == (not draws and not overload._schema.is_mutable)
