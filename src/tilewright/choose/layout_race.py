"""Races the layouts of a convolution on a GPU and keeps the outcome for all processes.

cuDNN's choice of kernels follows no simple rule. Of 1,487 random convolutions on an H200 channels-last operands were
faster in 70 % in fp32 with TF32 and in 80 % in bf16; the ratio of the two times went from 0.02 to 55.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.kernels.offer import OURS, THEIRS
from tilewright.launch.race import Alternatives, Race, random_operand
from tilewright.passes.convolution.memory_formats import FORMATS
from tilewright.passes.convolution.request import Convolution
from tilewright.records.outcomes import Outcome

MADE_FROM = ("choose/layout_race.py",)
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
    cudnn = torch.backends.cudnn
    settings = cudnn.version(), cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
    work = "layout", repr(replace(convolution, device=torch.device("meta"))), str(settings)
    return Race(work, convolution.device, MADE_FROM, partial(_alternatives, convolution), SECONDS)


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
