"""Convolutions of few input channels in a compiled program.

y = convolution(x, w, b, …)   →   y = tilewright.convolution(x, w, …) + b
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch.fx import Node

from tilewright.graph import calls
from tilewright.graph.insert import insert_call
from tilewright.hardware.target import FOR_GPUS, Target
from tilewright.kernels.convolution import COLUMNS, MOST_CHANNELS, convolution, refusal, result_strides
from tilewright.kernels.offer import OURS, THEIRS, Candidate, Offer
from tilewright.launch.race import Alternatives, Race, random_operand
from tilewright.pytorch.state import cudnn_takes_tf32

MADE_FROM = ("kernels/convolution",)
SECONDS = 0.02
"""Time of one race, beside the first calls."""
LEAST_ELEMENTS = 2**20
"""Of the result; smaller convolutions are bounded by their launches."""
EPS_OF_TF32 = 2.0**-10
"""The library may round operands of fp32 so, in one layout and not in the other, in forward or in a gradient alone."""
aten: Any = torch.ops.aten


def offers(node: Node, target: Target, waiting: Container[Node]) -> list[Offer]:
    """One for each tiling; none for several groups, many channels, or a small result."""
    given: dict[str, Any] = calls.arguments(node)
    x, weight, made = (calls.output(one) for one in (given["input"], given["weight"], node))
    if x is None or weight is None or made is None or given["transposed"] or given["groups"] != 1:
        return []
    if not 1 <= calls.shape_of(weight)[1] <= MOST_CHANNELS or prod(calls.shape_of(made)) < LEAST_ELEMENTS:
        return []
    geometry = _pair(given["stride"]), _pair(given["padding"]), _pair(given["dilation"])
    why = FOR_GPUS if target.language != "triton" else refusal(x, weight)
    options = (*geometry, calls.strides_of(made) == result_strides(calls.shape_of(made), channels_last=True))
    race = _race(x, weight, options) if why is None and target.is_present else None
    return [
        Offer(
            "tilewright.convolution", "the library's convolution", node, partial(_apply, node, given, options, columns),
            why, (node,), races=() if race is None else (race,), ways=(_way(columns),),
            unraced="only a race on the device decides between them", producer=given["input"],
        )
        for columns in COLUMNS
    ]  # fmt: skip


def _pair(values: Sequence[Any]) -> tuple[Any, ...]:
    """One number stands for both dimensions."""
    return tuple(values) * 2 if len(values) == 1 else tuple(values)


def _way(columns: int) -> str:
    return f"{OURS}, {columns} columns"


def _race(x: torch.Tensor, weight: torch.Tensor, options: tuple[Any, ...]) -> Race:
    """The library's convolution against this one, on operands that lie alike."""
    lie = tuple((calls.shape_of(one), calls.strides_of(one)) for one in (x, weight))
    work = "convolution", repr((lie, x.dtype, options)), library_settings()
    alternatives = partial(_alternatives, lie, x.dtype, x.device, options)
    return Race(work, x.device, MADE_FROM, alternatives, SECONDS, operand_eps(x.dtype))


def library_settings() -> str:
    """What chooses among the library's convolution kernels, beside their operands."""
    cudnn = torch.backends.cudnn
    return str((cudnn.version(), cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn_takes_tf32()))


def operand_eps(dtype: torch.dtype) -> float:
    """ε of what the library may round operands to, where that is more than their dtype's."""
    return EPS_OF_TF32 if dtype == torch.float32 and cudnn_takes_tf32() else 0.0


def _alternatives(
    lie: Sequence[tuple[Sequence[int], Sequence[int]]], dtype: torch.dtype, device: torch.device, options: Sequence[Any]
) -> Alternatives:
    own = torch.Generator(device).manual_seed(0)
    operands = [random_operand(*one, dtype, own) for one in lie]
    ours = {_way(columns): partial(convolution, *operands, *options, columns) for columns in COLUMNS}
    return {THEIRS: partial(torch.conv2d, *operands, None, *options[:3]), **ours}


def _apply(node: Node, given: dict[str, Any], options: Sequence[Any], columns: int) -> Node:
    ours: Any = torch.ops.tilewright
    geometry = (*map(list, options[:-1]), options[-1])
    new = result = insert_call(node, ours.convolution.default, given["input"], given["weight"], *geometry, columns)
    if given["bias"] is not None:
        along = insert_call(node, aten.view.default, given["bias"], [-1, 1, 1])
        result = insert_call(node, aten.add.Tensor, new, along)
    node.replace_all_uses_with(result)
    return new


CANDIDATE = Candidate(frozenset({"aten.convolution.default"}), offers)
