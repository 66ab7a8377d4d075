"""Upsampling by whole factors: gradients are sums of windows, in one kernel, and scatter nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.contract import keeps_contract, launched

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "by 2": lambda x: F.interpolate(x, scale_factor=2.0),
    "by 3 and 1": lambda x: F.interpolate(x, scale_factor=(3.0, 1.0), mode="nearest"),
    "to a size": lambda x: F.interpolate(x, (14, 44)),
    "the same": lambda x: F.interpolate(x, size=(7, 11)),
    "beside what was kept": lambda x: torch.cat([F.interpolate(x, scale_factor=2), x.repeat(1, 1, 2, 2)], 1).relu(),
}
SCATTERED: dict[str, Callable[[Tensor], Tensor]] = {
    "by 1.5": lambda x: F.interpolate(x, scale_factor=1.5),
    "to fewer": lambda x: F.interpolate(x, (3, 5)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", [*CALLS, *SCATTERED])
def test_gradients_are_sums_of_windows(name: str, layout: torch.memory_format, dtype: torch.dtype) -> None:
    function = {**CALLS, **SCATTERED}[name]
    x = torch.randn(2, 5, 7, 11).contiguous(memory_format=layout).to(dtype).requires_grad_()
    ran = launched(keeps_contract(function, [x]))
    assert any("index_put" in what for what in ran) == (name in SCATTERED)
    if name in CALLS:
        assert set(ran) == {"kernel"}
