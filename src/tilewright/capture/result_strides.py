"""Operators whose results PyTorch's fake tensors lay out otherwise than its kernels for CPUs do.

    y = roll(x, …)                →   y = clone(roll(clone(x), …), channels last)         for channels-last x
    y = batch_norm(x, …)          →   y = batch_norm(clone(x), …)                         for permuted x

With contiguous operands both say contiguous, so those are taken, and a copy has eager's layout. A generated kernel
reads and writes it at once: the copies cost nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tilewright.graph.layouts import laid_by, memory_order
from tilewright.pytorch.layouts import suggested_format

Restride = Callable[[Sequence[Any], torch.Tensor], torch.Tensor]
"""Gives a contiguous result the layout that follows from the call's arguments."""
RANKS = {torch.channels_last: 4, torch.channels_last_3d: 5}


def _format_of(place: int) -> Restride:
    """Channels last if the argument at `place` is, else contiguous; results per channel have no other layout."""

    def restride(arguments: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
        layout = suggested_format(arguments[place])
        return result.contiguous(memory_format=layout) if RANKS.get(layout) == result.dim() else result

    return restride


def _strides_of(place: int) -> Restride:
    """The order of the dimensions in memory is that of the argument at `place`; an expanded one has none."""

    def restride(arguments: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
        strides = arguments[place].stride()
        if 0 in strides:
            return result
        return laid_by(result, memory_order(strides))

    return restride


def _rolled(arguments: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    return _format_of(0)(arguments, result) if len(arguments) > 2 and arguments[2] else result


def _contiguous(_: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    return result


def _of_angles(arguments: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    return result if arguments[0].is_complex() else _strides_of(0)(arguments, result)


_PADS = [f"{kind}_pad{axes}d" for kind in ("reflection", "replication") for axes in (2, 3)]
_RESTRIDES: dict[Restride, list[str]] = {
    _rolled: ["roll.default"],
    _of_angles: ["angle.default"],
    _format_of(0): [
        *(f"{name}.default" for name in _PADS),
        "channel_shuffle.default",
        "native_channel_shuffle.default",
        "max_unpool2d.default",
        "_native_batch_norm_legit_functional.default",
        "_native_batch_norm_legit.no_stats",
        "_native_batch_norm_legit_no_training.default",
        "native_batch_norm.default",
        "_batch_norm_with_update_functional.default",
    ],
    _format_of(1): [
        *(f"{name}_backward.default" for name in _PADS),
        "native_batch_norm_backward.default",
        "batch_norm_backward.default",
        "native_group_norm_backward.default",
    ],
    _strides_of(0): [
        "elu_backward.default",
        "hardsigmoid_backward.default",
        "hardswish_backward.default",
        "hardtanh_backward.default",
        "native_dropout_backward.default",
        "softplus_backward.default",
    ],
    _strides_of(1): ["rrelu_with_noise_functional.default"],
    _contiguous: [
        "_log_softmax_backward_data.default",
        "_upsample_nearest_exact1d.default",
        "_upsample_nearest_exact1d.vec",
        "_weight_norm_interface.default",
        "glu_backward.default",
        "huber_loss_backward.default",
        "log_sigmoid_forward.default",
        "mse_loss_backward.default",
        "native_layer_norm_backward.default",
        "normal.Tensor_Tensor",
        "normal.Tensor_float",
        "normal.float_Tensor",
        "pow.Scalar",
        "smooth_l1_loss_backward.default",
        "upsample_linear1d.default",
        "upsample_linear1d.vec",
        "upsample_nearest1d.default",
        "upsample_nearest1d.vec",
    ],
}


def laid_out_as_eager() -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Each operator, and what traces it."""
    for restride, names in _RESTRIDES.items():
        for name in names:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet, None), overload, None)
            if operator is not None:
                yield operator, functools.partial(_laid_out, operator, restride, "batch_norm" in name)


def _laid_out(operator: Any, restride: Restride, knows_images: bool, *args: Any, **kwargs: Any) -> Any:
    """`knows_images`: of channels-last tensors its fake ones say what its kernels do."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    known = all(_is_plain(x) or (knows_images and _lies_channels_last(x)) for x in tensors)
    if known or any(x.device.type != "cpu" for x in tensors):
        return NotImplemented
    found = operator(*map(_plain, args), **{name: _plain(x) for name, x in kwargs.items()})
    if isinstance(found, torch.Tensor):
        return restride(args, found)
    return tuple(restride(args, x) if isinstance(x, torch.Tensor) else x for x in found)


def _lies_channels_last(x: torch.Tensor) -> bool:
    return any(x.dim() == rank and x.is_contiguous(memory_format=layout) for layout, rank in RANKS.items())


def _is_plain(x: torch.Tensor) -> bool:
    return x.layout is not torch.strided or x.is_contiguous()


def _plain(x: Any) -> Any:
    return x.contiguous() if isinstance(x, torch.Tensor) and not _is_plain(x) else x
