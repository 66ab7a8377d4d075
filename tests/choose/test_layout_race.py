"""The calls that race the layouts of a convolution compute the convolution and its gradients."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tilewright.choose.layouts import _alternative
from tilewright.kernels.offer import OURS, THEIRS
from tilewright.measure.timing.contest import agree
from tilewright.passes.convolution.channels_last import Convolution

CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]] = {
    "conv2d": ((2, 4, 9, 7), (6, 2, 3, 3), (2, "valid", 1, 2)),
    "conv3d": ((2, 4, 5, 6, 7), (6, 4, 3, 1, 3), (1, (1, 0, 1), 1, 1)),
    "conv_transpose2d": ((2, 4, 9, 7), (4, 3, 3, 3), (2, 1, 1, 2, 1)),
    "conv_transpose3d": ((2, 4, 5, 6, 7), (4, 3, 3, 3, 3), (2, 1, 1, 1, 1)),
}


@pytest.mark.parametrize("gradients", [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("function", CASES)
def test_both_layouts_compute_the_same(function: str, gradients: tuple[bool, bool]) -> None:
    sizes, weights, options = CASES[function]
    lies = [(shape, torch.empty(shape).stride()) for shape in (sizes, weights)]
    request = Convolution(function, lies[0], lies[1], options, torch.float64, torch.device("cpu"), gradients)
    own = torch.Generator().manual_seed(0)
    x, weight = (torch.empty(shape, dtype=torch.float64).normal_(generator=own) for shape in (sizes, weights))
    x, weight = (operand.requires_grad_(asked) for operand, asked in zip((x, weight), gradients, strict=True))
    y = getattr(F, function)(x, weight, None, *options)
    wanted = [operand for operand in (x, weight) if operand.requires_grad]
    expected = [y.detach(), *(torch.autograd.grad(y, wanted, y.detach()) if wanted else ())]
    for layout in (THEIRS, OURS):
        name, call = _alternative(request, layout)
        assert name == layout and agree(list(call()), expected)
