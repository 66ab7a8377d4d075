"""A 2-D convolution of few input channels; `columns` chooses its tiles."""

from __future__ import annotations

from tilewright.operators.arithmetic import Arithmetic, nothing
from tilewright.operators.products import convolution_flops, library_convolution
from tilewright.operators.row import own

own(
    "convolution(Tensor self, Tensor weight, int[] stride, int[] padding, int[] dilation, bool channels_last, "
    "int columns) -> Tensor",
    "compute",
    arithmetic=Arithmetic(convolution_flops, nothing),
    shapes=library_convolution,
    dtypes=("self",),
    role="convolution",
)
