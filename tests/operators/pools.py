"""Pools and upsamplings for the tests of this package and of the Triton emitter: windows that hurt, NaN and ties."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.contract import launched, recorded

LAYOUTS = {"NCHW": torch.contiguous_format, "channels last": torch.channels_last}


def _max(*args: Any, **named: Any) -> Callable[[Tensor], Any]:
    return lambda x: F.max_pool2d(x, *args, **named, return_indices=True)


def _average(*args: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.avg_pool2d(x, *args)


def _volume(x: Tensor) -> Tensor:
    """[1, 2, 5, 13, 18]."""
    return x.unflatten(0, (1, 2))


APART: dict[str, Callable[[Tensor], Any]] = {
    "max 2": _max(2),
    "max 2, ceil": _max(2, ceil_mode=True),
    "max 2 × 1 every 2 × 3": _max((2, 1), (2, 3), (1, 0)),
    "max of a ReLU": lambda x: F.max_pool2d(F.relu(x), 2),
    "average 2": _average(2),
    "average 2 every 3, divided by 7": _average(2, 3, 1, True, True, 7),
    "mean over all places": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive, multiples": lambda x: F.adaptive_avg_pool2d(x[..., :12, :18], (4, 9)),
    "adaptive, long windows": lambda x: F.adaptive_avg_pool2d(x[..., :12, :18], (2, 2)),
    "adaptive, the same": lambda x: F.adaptive_avg_pool2d(x, (13, 18)),
    "max 2 of volumes": lambda x: F.max_pool3d(_volume(x), 2, return_indices=True),
    "max 1 × 2 × 3 of volumes, ceil": lambda x: F.max_pool3d(
        _volume(x), (1, 2, 3), ceil_mode=True, return_indices=True
    ),
    "average 2 of volumes": lambda x: F.avg_pool3d(_volume(x), 2, padding=(1, 0, 1)),
    "adaptive, volumes": lambda x: F.adaptive_avg_pool3d(_volume(x)[..., :12, :18], (5, 4, 9)),
    "adaptive, long windows of volumes": lambda x: F.adaptive_avg_pool3d(_volume(x)[..., :12, :18], (1, 2, 2)),
}
"""Windows side by side."""
OVERLAPPING: dict[str, Callable[[Tensor], Any]] = {
    "max 3 every 2": _max(3, 2, 1),
    "max 3, dilated": _max(3, 1, 1, 2),
    "max 3 × 2": _max((3, 2), (2, 3), (1, 0), ceil_mode=True),
    "max 5 every 3": _max(5, 3, 2, ceil_mode=True),
    "average 3 every 2": _average(3, 2, 1),
    "average 3 every 2, ceil": _average(3, 2, 1, True),
    "average 3 every 2, ceil, without padding": _average(3, 2, 1, True, False),
    "average 3 × 2": _average((3, 2), (1, 2), (1, 0)),
    "max 3 every 2 of volumes": lambda x: F.max_pool3d(_volume(x), 3, 2, 1, return_indices=True),
    "average 3 every 2 of volumes": lambda x: F.avg_pool3d(_volume(x), 3, 2, 1, count_include_pad=False),
}
"""Windows that share elements, which stay PyTorch's on a CPU."""
LEFT: dict[str, Callable[[Tensor], Any]] = {
    "max 6": _max(6, 2, 1),
    "max of an exponential": lambda x: F.max_pool2d(x.exp(), 2).exp(),
    "adaptive, some longer": lambda x: F.adaptive_avg_pool2d(x, (7, 7)),
}
"""Windows that stay PyTorch's everywhere, or read what is computed once."""


def in_layouts(*groups: dict[str, Callable[[Tensor], Any]]) -> list[tuple[str, str]]:
    """Each in one layout, in turn; the first of each group in both."""
    names = [name for group in groups for name in group]
    both = [(next(iter(group)), layout) for group in groups for layout in LAYOUTS]
    return list(dict.fromkeys([*both, *zip(names, itertools.cycle(LAYOUTS), strict=False)]))


def image(layout: str) -> Tensor:
    """[2, 5, 13, 18] with NaN, ties and a corner of -inf."""
    x = torch.randn(2, 5, 13, 18, generator=torch.Generator().manual_seed(4))
    x[0, 0, 2:4, 3:5], x[1, 1, 5:9, 5:9], x[:, :, 7, 7] = torch.nan, -torch.inf, x[:, :, 7, 8]
    return x.contiguous(memory_format=LAYOUTS[layout])


def results(function: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
    """The result and its gradient, with distant results weighted differently."""
    x = x.detach().clone().requires_grad_()
    found = function(x)
    found = list(found) if isinstance(found, tuple) else [found]
    weights = torch.arange(found[0].numel(), device=x.device).reshape(found[0].shape) / 7
    (gradient,) = torch.autograd.grad(found[0], x, weights)
    return [*(y.detach() for y in found), gradient]


def library_pools(name: str, x: Tensor) -> list[str]:
    """The poolings that PyTorch computes where a program is compiled, whose results are eager's."""
    function = {**APART, **OVERLAPPING, **LEFT}[name]
    call, record = recorded(function)
    assert differences(function, call, x) == []
    return [what for what in launched(record) if what != "kernel" and "pool" in what]


def differences(function: Callable[[Tensor], Any], compiled: Callable[[Tensor], Any], x: Tensor) -> list[str]:
    """Results that are not eager's on a CPU: positions of maxima are exactly those, sums within fp32.

    Not on a GPU: there PyTorch 2.11 gives a wrong gradient of an average pool with padding where channels are last
    (https://github.com/pytorch/pytorch/issues/188344).
    """
    wrong = []
    found, wanted = results(compiled, x), results(function, x.cpu())
    for number, (ours, eager) in enumerate(zip((y.cpu() for y in found), wanted, strict=True)):
        exact = not eager.is_floating_point()
        close = torch.allclose(ours, eager, rtol=0 if exact else 3e-6, atol=0 if exact else 1e-5, equal_nan=True)
        if not close or ours.stride() != eager.stride():
            wrong.append(f"result {number} of {list(eager.shape)}")
    return wrong
