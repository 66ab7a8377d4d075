"""Races the layouts of a convolution on a GPU and keeps the outcome for all processes.

cuDNN's choice of kernels follows no simple rule. Of 1,487 random convolutions on an H200 channels-last operands were
faster in 70 % in fp32 with TF32 and in 80 % in bf16; the ratio of the two times went from 0.02 to 55.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.measure.timing.contest import contest
from tilewright.passes.convolution.memory_formats import FORMATS
from tilewright.passes.convolution.request import Convolution, Layout, RacedLayouts
from tilewright.pytorch.state import in_real_tensors
from tilewright.records import cache, outcomes

AS_IS, CHANNELS_LAST = "as it is", "channels last"
IN_TF32 = " in TF32"
"""Ends the name of an alternative whose fp32 products round their operands to TF32."""
BELOW_TF32 = 1 + 2.0**-12
"""TF32 has 10 bits after the point: it takes this number for 1."""
SECONDS = 0.02
"""Time of one race, beside the first calls. A model has tens of convolutions, and few are close."""


def raced_layouts(convolution: Convolution) -> RacedLayouts | None:
    """The convolution and its gradients in both layouts. None without a GPU, or where one failed."""
    if convolution.device.type != "cuda":
        return None
    key = _key(convolution)
    if outcomes.lookup(key) is None:
        with in_real_tensors(), torch.cuda.device(convolution.device), torch.autocast("cuda", enabled=False):
            try:
                alternatives = dict(_alternative(convolution, layout) for layout in (AS_IS, CHANNELS_LAST))
                outcomes.keep(key, contest(alternatives, convolution.device, seconds=SECONDS))
            except torch.OutOfMemoryError:
                return None
    times = known.times_us if (known := outcomes.lookup(key)) else {}
    # One is missing if its results were wrong.
    found = [(times[name], name.endswith(IN_TF32)) for one in (AS_IS, CHANNELS_LAST) for name in times if one in name]
    return RacedLayouts(*(Layout(us, rounds) for us, rounds in found)) if len(found) == 2 else None


def _key(convolution: Convolution) -> str:
    cudnn = torch.backends.cudnn
    settings = cudnn.version(), cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
    name = torch.cuda.get_device_name(convolution.device)
    return cache.key_of("layout", repr(convolution), str(settings), name, torch.__version__)


def _alternative(convolution: Convolution, layout: str) -> tuple[str, partial[tuple[Tensor, ...]]]:
    """Its name, and a call with gradients on random operands."""
    x, weight = _operands(convolution, layout)
    name = layout + (IN_TF32 if rounds_to_tf32(convolution, x, weight) else "")
    own = torch.Generator(x.device).manual_seed(0)
    for operand, drawn in zip((x, weight), _operands(convolution, AS_IS), strict=True):
        operand.copy_(drawn.normal_(generator=own))
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
    last = layout == CHANNELS_LAST
    return [x.contiguous(memory_format=FORMATS[x.dim()]) if last else x for x in made]


def _call(convolution: Convolution, x: Tensor, weight: Tensor, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    function = getattr(F, convolution.function)
    with torch.set_grad_enabled(bool(wanted)):
        made = function(x, weight, None, *convolution.options)
        return (made.detach(), *(torch.autograd.grad(made, wanted, made.detach()) if wanted else ()))
