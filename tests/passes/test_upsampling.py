"""Upsampling: gradients are sums of the results that read an element, in kernels, and scatter nothing."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.contract import keeps_contract, launched
from tests.gpu.kernels.launching import in_turn

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "by 2": lambda x: F.interpolate(x, scale_factor=2.0),
    "to a size": lambda x: F.interpolate(x, (14, 44)),
    "the same": lambda x: F.interpolate(x, size=(7, 11)),
    "beside what was kept": lambda x: torch.cat([F.interpolate(x, scale_factor=2), x.repeat(1, 1, 2, 2)], 1).relu(),
    "bilinear by 4": lambda x: F.interpolate(x, scale_factor=4, mode="bilinear"),
    "bilinear, one axis": lambda x: F.interpolate(x, (7, 29), mode="bilinear"),
    "bilinear, any sizes": lambda x: F.interpolate(x, (19, 16), mode="bilinear"),
    "bilinear, to fewer": lambda x: F.interpolate(x, (3, 5), mode="bilinear"),
    "bilinear, to one": lambda x: F.interpolate(x, (1, 1), mode="bilinear", align_corners=True),
    "bilinear, corners": lambda x: F.interpolate(x, (13, 31), mode="bilinear", align_corners=True),
    "bilinear by 1.7": lambda x: F.interpolate(x, scale_factor=(1.7, 2.3), mode="bilinear"),
    "bilinear by 1.7, counted again": lambda x: F.interpolate(
        x, scale_factor=1.7, mode="bilinear", recompute_scale_factor=True
    ),
    "after a function": lambda x: F.interpolate(x.exp(), scale_factor=2, mode="bilinear").relu(),
    "of a part": lambda x: F.interpolate(torch.cat([x, x.relu()], 1)[:, 2:9], scale_factor=2, mode="bilinear").sin(),
    "of one axis": lambda x: F.interpolate(x.flatten(2), scale_factor=2, mode="linear"),
    "of three axes": lambda x: F.interpolate(x[:, :4].unflatten(1, (2, 2)), (3, 9, 22), mode="trilinear"),
}
BY_PYTORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "by 1.5": lambda x: F.interpolate(x, scale_factor=1.5),
    "to fewer": lambda x: F.interpolate(x, (3, 5)),
    "exact": lambda x: F.interpolate(x, (10, 33), mode="nearest-exact"),
    "bicubic by 2": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "of three axes, exact": lambda x: F.interpolate(x.unflatten(1, (1, 5)), (3, 9, 22), mode="nearest-exact"),
    "of one row by more than kernels take": lambda x: F.interpolate(x[..., :1, :2], (1, 90), mode="bilinear"),
}
"""Gradients by eager's operators."""


PLAIN, LAST = (torch.float32, torch.contiguous_format), (torch.bfloat16, torch.channels_last)


@pytest.mark.parametrize(("name", "laid"), in_turn([*CALLS, *BY_PYTORCH], [(PLAIN, LAST)]))
def test_gradients_are_sums_of_results(name: str, laid: tuple[torch.dtype, torch.memory_format]) -> None:
    function, (dtype, layout) = {**CALLS, **BY_PYTORCH}[name], laid
    x = torch.randn(2, 5, 7, 11).contiguous(memory_format=layout).to(dtype).requires_grad_()
    ran = launched(keeps_contract(function, [x]))
    assert ["upsample" in what for what in ran if what != "kernel"] == [True] * (name in BY_PYTORCH)


FACTORS: list[tuple[str, int, float | tuple[float, ...]]] = [
    ("nearest", 2, 1.3),
    ("nearest", 2, (1.05, 2.3)),
    ("nearest", 3, (1.3, 2.3, 1.7)),
    ("bilinear", 2, (1.05, 1.7)),
    ("trilinear", 3, (1.3, 1.2, 1.7)),
]


@pytest.mark.parametrize(
    ("mode", "axes", "factor", "backward"), [*((*one, True) for one in FACTORS), (*FACTORS[0], False)], ids=str
)
def test_an_axis_that_keeps_or_doubles_its_size_by_another_factor(
    mode: str, axes: int, factor: float | tuple[float, ...], backward: bool
) -> None:
    """Eager's kernels for CPUs go by the sizes there, in some modes."""
    x = torch.randn(2, 5, *(3, 4, 11)[-axes:], requires_grad=backward)
    keeps_contract(lambda x: F.interpolate(x, scale_factor=factor, mode=mode), [x], training=backward)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_eager_reads_many_results_by_the_factor_unless_they_are_channels_last(layout: torch.memory_format) -> None:
    x = torch.randn(1, 5, 120, 3).contiguous(memory_format=layout)
    keeps_contract(lambda x: F.interpolate(x, scale_factor=1.3), [x], training=False)
