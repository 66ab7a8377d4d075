"""Channels-last tensors for convolutions: on a GPU where its convolutions are faster together with the copies that this
takes, and on a CPU for fp32 ones in nets with depthwise convolutions.

cuDNN's fast kernels take channels-last operands, and convert others before and after each convolution (30 % of a
ResNet's inference on an H200, 18 % of its training). oneDNN converts operands of dense convolutions in any case, of
depthwise ones only if they are not channels-last. Two images of 64 × 64 pixels through seven bottlenecks on one CPU
thread: with depthwise convolutions inference 4.7 → 3.4 ms and training 14.5 → 13.0, with dense ones 8.2 → 9.0 and
29.0 → 35.7.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, fx

from tilewright.choose.chooser import chosen
from tilewright.choose.layout_race import layout_race, rounded
from tilewright.cost.work import Work
from tilewright.graph.calls import number
from tilewright.graph.canonical import argument, canonical_name, example
from tilewright.hardware.target import Target
from tilewright.kernels.device import NARROW
from tilewright.kernels.offer import OURS, THEIRS, Offer
from tilewright.passes.convolution.channels_last import (
    WIDE,
    changed_by,
    is_channels_last,
    is_of,
    is_trained,
    lay_channels_last,
    obstacle,
)
from tilewright.passes.convolution.request import CONVOLUTIONS, convolution_of

MIN_CHANNELS = 16
"""With this many input channels a group, a convolution runs on matrix units without padding. Where no convolution was
raced, most of the work must be in such ones."""
MOST_ROUNDED = 4
"""At most so many times as many convolutions may round operands to TF32 as in eager's layout. Independent errors add
in squares, so that a result's error at most doubles, as the numbers contract has it."""
DEPTHWISE = 8
"""On a CPU at least one in this many convolutions must be depthwise."""
ON_CPU = ("conv2d",)
TRANSPOSED = ("conv_transpose2d", "conv_transpose3d")


def offers(graph: fx.Graph, target: Target) -> Iterator[Sequence[Offer]]:
    """An offer for all convolutions of a torch-level graph from Dynamo."""
    dtypes = (*NARROW, *WIDE) if target.is_gpu else WIDE
    names = [*CONVOLUTIONS] if target.is_gpu else ON_CPU
    convolutions = [node for node in graph.nodes if canonical_name(node) in names and is_of(node, dtypes)]
    if convolutions:
        yield [_offer(graph, convolutions, dtypes, target)]


def _offer(graph: fx.Graph, convolutions: list[fx.Node], dtypes: tuple[torch.dtype, ...], target: Target) -> Offer:
    first, count = convolutions[0], len(convolutions)

    def write() -> fx.Node:
        lay_channels_last(graph, convolutions, dtypes)
        return first

    offer = Offer("the channels-last layout", f"that of {count} convolutions", first, write, producer=first)
    if reason := obstacle(graph, convolutions, target):
        return replace(offer, refusal=reason)
    if not target.is_gpu:
        few = DEPTHWISE * sum(map(_is_depthwise, convolutions)) < count
        kept = f"fewer than one convolution in {DEPTHWISE} is depthwise, and oneDNN converts the others' operands"
        return replace(offer, refusal=kept if few else None)
    return _raced(offer, graph, convolutions) or replace(offer, refusal=_unsuited(convolutions))


def _raced(offer: Offer, graph: fx.Graph, convolutions: list[fx.Node]) -> Offer | None:
    """The offer with a race of each convolution, which prediction knows too little of; None if one has no outcome."""
    requests = [convolution_of(node) for node in convolutions]
    races = [race for one in requests if one is not None and (race := layout_race(one)) is not None]
    outcomes = [outcome for race in races if (outcome := race.outcome()) is not None]
    if len(outcomes) < len(convolutions):
        return None
    before, after = (sum(rounded(outcome, name) for outcome in outcomes) for name in (THEIRS, OURS))
    if after > MOST_ROUNDED * before:
        return replace(offer, refusal=f"{after} of {len(races)} would round to TF32, as they are {before} do")
    return replace(offer, races=tuple(races), work=tuple(_copies(graph, convolutions)), clear=1.0)


def _unsuited(convolutions: list[fx.Node]) -> str | None:
    """Why convolutions that were not raced keep their layout."""
    work = {node: _multiplications(node) for node in convolutions}
    suited = sum(work[node] for node in convolutions if _channels(node) >= MIN_CHANNELS)
    if 2 * suited < sum(work.values()):
        return f"most of the work is in convolutions with fewer than {MIN_CHANNELS} input channels a group"
    return None


def _copies(graph: fx.Graph, convolutions: list[fx.Node]) -> Iterator[Work]:
    """The copies of operands and results, and of their gradients back."""
    changed = changed_by(convolutions)
    operands = {argument(node, place, name) for node in convolutions for place, name in ((0, "input"), (1, "weight"))}
    copied = [x for x in operands if x not in changed and not is_channels_last(x)]
    copied += [x for x in graph.output_node().all_input_nodes if x in changed and not is_channels_last(x)]
    for node in copied:
        value = example(node)
        nbytes = 0 if value is None else value.numel() * value.itemsize
        yield from [Work("pointwise", nbytes, nbytes)] * (2 if is_trained(node) else 1)


def _is_depthwise(node: fx.Node) -> bool:
    source = example(argument(node, 0, "input"))
    return source is not None and source.shape[1] > 1 and _weight(node).shape[1] == 1


def _weight(node: fx.Node) -> Tensor:
    value = example(argument(node, 1, "weight"))
    assert value is not None
    return value


def _channels(node: fx.Node) -> int:
    """Input channels per group."""
    if canonical_name(node) not in TRANSPOSED:
        return int(_weight(node).shape[1])
    return int(_weight(node).shape[0]) // number(argument(node, 6, "groups", 1))


def _multiplications(node: fx.Node) -> int:
    """Elements of the result (of the input, if the convolution is transposed) times the weights of one channel."""
    places = example(argument(node, 0, "input") if canonical_name(node) in TRANSPOSED else node)
    sizes = (*_weight(node).shape[1:], *(() if places is None else places.shape))
    return prod(int(size) if isinstance(size, int) else 1 for size in sizes)


channels_last = chosen("channels_last", offers)
