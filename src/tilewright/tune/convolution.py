"""Races the layouts of a convolution on a GPU and keeps the outcome for all processes.

cuDNN's choice of kernels follows no simple rule. Of 1,487 random convolutions on an H200 channels-last operands were
faster in 70 % in fp32 with TF32 and in 80 % in bf16; the ratio of the two times went from 0.02 to 55.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewright.graph.pytorch_state import in_real_tensors
from tilewright.measure.timing.contest import contest
from tilewright.passes.convolution.memory_formats import FORMATS
from tilewright.passes.convolution.request import Convolution
from tilewright.records import cache, outcomes

AS_IS, CHANNELS_LAST = "as it is", "channels last"
SECONDS = 0.02
"""Time of one race, beside the first calls. A model has tens of convolutions, and few are close."""


def layout_times(convolution: Convolution) -> tuple[float, float] | None:
    """Microseconds of the convolution and its gradients in both layouts. None without a GPU, or where one failed."""
    if convolution.device.type != "cuda":
        return None
    key = _key(convolution)
    if outcomes.kept(key) is None:
        with in_real_tensors(), torch.cuda.device(convolution.device), torch.autocast("cuda", enabled=False):
            try:
                alternatives = {AS_IS: _calls(convolution, None), CHANNELS_LAST: _calls(convolution, CHANNELS_LAST)}
                outcomes.keep(key, contest(alternatives, convolution.device, seconds=SECONDS))
            except torch.OutOfMemoryError:
                return None
    times = known.times_us if (known := outcomes.kept(key)) else {}
    return (times[AS_IS], times[CHANNELS_LAST]) if {AS_IS, CHANNELS_LAST} <= times.keys() else None


def _key(convolution: Convolution) -> str:
    cudnn = torch.backends.cudnn
    settings = cudnn.version(), cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
    name = torch.cuda.get_device_name(convolution.device)
    return cache.key_of("layout", repr(convolution), str(settings), name, torch.__version__)


def _calls(convolution: Convolution, layout: str | None) -> partial[tuple[Tensor, ...]]:
    own = torch.Generator(convolution.device).manual_seed(0)
    x, weight = (
        torch.empty_strided(*lies, dtype=convolution.dtype, device=convolution.device).normal_(generator=own)
        for lies in (convolution.input, convolution.weight)
    )
    if layout == CHANNELS_LAST:
        x, weight = (operand.contiguous(memory_format=FORMATS[operand.dim()]) for operand in (x, weight))
    wanted = [operand.requires_grad_(asked) for operand, asked in zip((x, weight), convolution.gradients, strict=True)]
    return partial(_call, convolution, x, weight, [operand for operand in wanted if operand.requires_grad])


def _call(convolution: Convolution, x: Tensor, weight: Tensor, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    function = getattr(F, convolution.function)
    with torch.set_grad_enabled(bool(wanted)):
        made = function(x, weight, None, *convolution.options)
        return (made.detach(), *(torch.autograd.grad(made, wanted, made.detach()) if wanted else ()))
