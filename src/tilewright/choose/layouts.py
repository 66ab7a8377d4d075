"""Channels-last tensors for convolutions: on a GPU where its convolutions, raced, are faster together with the copies
that this takes; on a CPU, predicted, for fp32 ones in nets with depthwise convolutions.

cuDNN's fast kernels take channels-last operands, and convert others before and after each convolution (30 % of a
ResNet's inference on an H200, 18 % of its training). Which is faster follows no simple rule: of 1,487 random
convolutions channels-last operands were faster in 70 % in fp32 with TF32 and in 80 % in bf16; the ratio went from 0.02
to 55. oneDNN converts operands of dense convolutions in any case, of depthwise ones only if they are not channels-last:
seven bottlenecks on one CPU thread, inference, took 4.7 → 3.4 ms with depthwise convolutions, 8.2 → 9.0 with dense
ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from tilewright.choose.chooser import chosen
from tilewright.cost.work import Work, predicted_us
from tilewright.graph.calls import number
from tilewright.graph.canonical import argument, canonical_name, example, tensor_of
from tilewright.graph.layouts import FORMATS
from tilewright.hardware.target import Target
from tilewright.kernels.convolution.offer import library_settings, operand_eps
from tilewright.kernels.device import NARROW
from tilewright.kernels.offer import OURS, THEIRS, Offer
from tilewright.launch.race import Alternatives, Race, random_operand
from tilewright.passes.convolution.channels_last import (
    CONVOLUTIONS,
    WIDE,
    Convolution,
    changed_by,
    convolution_of,
    is_channels_last,
    is_of,
    is_trained,
    lay_channels_last,
    obstacle,
)
from tilewright.passes.convolution.other_forms import is_small_and_depthwise
from tilewright.records.outcomes import Outcome

MADE_FROM = ("choose/layouts.py",)
IN_TF32 = " in TF32"
"""Ends the name of an alternative whose fp32 products round their operands to TF32."""
BELOW_TF32 = 1 + 2.0**-12
"""TF32 has 10 bits after the point: it takes this number for 1."""
SECONDS = 0.02
"""Time of one race, beside the first calls. A model has tens of convolutions, and few are close."""


def layout_race(convolution: Convolution) -> Race | None:
    """The convolution and its gradients as it is (`THEIRS`) and channels last (`OURS`); None without a GPU."""
    if convolution.device.type != "cuda":
        return None
    work = "layout", repr(replace(convolution, device=torch.device("meta"))), library_settings()
    eps = operand_eps(convolution.dtype)
    return Race(work, convolution.device, MADE_FROM, partial(_alternatives, convolution), SECONDS, eps)


def rounded(outcome: Outcome, name: str) -> bool:
    """Whether the convolution of that name rounds fp32 operands to TF32."""
    return f"{name}{IN_TF32}" in outcome.times_us


def _alternatives(convolution: Convolution) -> Alternatives:
    return dict(_alternative(convolution, name) for name in (THEIRS, OURS))


def _alternative(convolution: Convolution, layout: str) -> tuple[str, partial[tuple[Tensor, ...]]]:
    """Its name, and a call with gradients on random operands."""
    x, weight = _operands(convolution, layout)
    name = layout + (IN_TF32 if rounds_to_tf32(convolution, x, weight) else "")
    own = torch.Generator(x.device).manual_seed(0)
    for operand, lies in zip((x, weight), (convolution.input, convolution.weight), strict=True):
        operand.copy_(random_operand(*lies, operand.dtype, own))
    wanted = [operand.requires_grad_(asked) for operand, asked in zip((x, weight), convolution.gradients, strict=True)]
    return name, partial(_call, convolution, x, weight, [operand for operand in wanted if operand.requires_grad])


def rounds_to_tf32(convolution: Convolution, x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel that the library takes for these operands, which are overwritten, rounds them to TF32."""
    if convolution.dtype != torch.float32:
        return False
    weight.fill_(1)
    ones, above = (_call(convolution, x.fill_(value), weight, [])[0].double().sum() for value in (1, BELOW_TF32))
    return bool(above < ones * (1 + BELOW_TF32) / 2)


def _operands(convolution: Convolution, layout: str) -> list[Tensor]:
    made = [
        torch.empty_strided(*lies, dtype=convolution.dtype, device=convolution.device)
        for lies in (convolution.input, convolution.weight)
    ]
    last = layout == OURS
    return [x.contiguous(memory_format=FORMATS[x.dim()]) if last else x for x in made]


def _call(convolution: Convolution, x: Tensor, weight: Tensor, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    function = getattr(F, convolution.function)
    with torch.set_grad_enabled(bool(wanted)):
        made = function(x, weight, None, *convolution.options)
        return (made.detach(), *(torch.autograd.grad(made, wanted, made.detach()) if wanted else ()))


MIN_CHANNELS = 16
"""With this many input channels a group, a convolution runs on matrix units without padding. Where no convolution was
raced, most of the work must be in such ones."""
MOST_ROUNDED = 4
"""At most so many times as many convolutions may round operands to TF32 as in eager's layout. Independent errors add
in squares, so that a result's error at most doubles, as the numbers contract has it."""
GENERATED = 1.5
"""Times of the traffic alone that a generated depthwise convolution takes: 1.1 to 1.6 of 3 × 3 on an H200, fp32."""
DEPTHWISE = 8
"""On a CPU at least one in this many convolutions must be depthwise."""
ON_CPU = ("conv2d",)
TRANSPOSED = ("conv_transpose2d", "conv_transpose3d")


def offers(graph: fx.Graph, target: Target) -> Iterator[Sequence[Offer]]:
    """An offer for all convolutions of a torch-level graph from Dynamo."""
    dtypes = (*NARROW, *WIDE) if target.is_gpu else WIDE
    names = [*CONVOLUTIONS] if target.is_gpu else ON_CPU
    found = [node for node in graph.nodes if canonical_name(node) in names and is_of(node, dtypes)]
    # The channels of one image without a batch are no second axis.
    convolutions = [node for node in found if tensor_of(node).dim() == _weight(node).dim()]
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
        kept = f"it helps depthwise convolutions, fewer than 1 in {DEPTHWISE} here; oneDNN changes that of others"
        return replace(offer, refusal=kept if few else None)
    return _raced(offer, graph, convolutions, target) or replace(offer, refusal=_unsuited(convolutions, target))


def _raced(offer: Offer, graph: fx.Graph, convolutions: list[fx.Node], target: Target) -> Offer | None:
    """The offer with a race of each convolution, which prediction knows too little of; None if one has no outcome."""
    found = []
    for node in convolutions:
        one = convolution_of(node)
        race = None if one is None else layout_race(one)
        outcome = None if race is None else race.outcome()
        if race is None or outcome is None:
            return None
        found.append((node, race, outcome))
    before, after = (sum(rounded(outcome, name) for _, _, outcome in found) for name in (THEIRS, OURS))
    if after > MOST_ROUNDED * before:
        return replace(offer, refusal=f"{after} of {len(found)} would round to TF32, as they are {before} do")
    races = tuple(race for node, race, _ in found if not _is_generated(node))
    # Channels last, cuDNN computes what a generated kernel does otherwise.
    instead = [outcome.us(OURS) - _generated_us(node, target) for node, _, outcome in found if _is_generated(node)]
    return replace(offer, races=races, beside=(*_copies(graph, convolutions), *instead), clear=1.0)


def _unsuited(convolutions: list[fx.Node], target: Target) -> str | None:
    """Why convolutions that were not raced, as those of symbolic sizes are not, keep their layout."""
    if target.is_present and any(operand_eps(tensor_of(node).dtype) for node in convolutions):
        return "no race has shown how many of them would round to TF32"
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


def _generated_us(node: fx.Node, target: Target) -> float:
    values = example(argument(node, 0, "input")), example(node)
    read, written = (0 if x is None else x.numel() * x.itemsize for x in values)
    return GENERATED * predicted_us(Work("pointwise", read, written), target.profile)


def _is_generated(node: fx.Node) -> bool:
    """Whether a kernel is generated for a convolution without a gradient, unless its operand is channels-last."""
    x, made = example(argument(node, 0, "input")), example(node)
    if x is None or made is None or made.requires_grad or canonical_name(node) in TRANSPOSED:
        return False
    return is_small_and_depthwise(x, _weight(node), argument(node, 6, "groups", 1))


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
