"""Discrete Fourier transforms: calls of a library.

5 n log₂ n FLOPs for n complex points, as the benchmarks of FFTs count (http://www.fftw.org/speed/method.html); half of
that where one side is real.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import log2

from tilewright.operators.arithmetic import Arithmetic, CallSizes, Count, Shape, elements, nothing
from tilewright.operators.row import calls


def _points(sizes: CallSizes, shape: Shape, per_point: float) -> Count:
    dims = sizes.argument("dim")
    assert isinstance(dims, Sequence)
    n = sizes.only_number(elements([shape[dim] for dim in dims]))  # type: ignore[arg-type]
    return int(per_point * log2(max(n, 2))) * elements(shape)


transforms = partial(calls, operator_class="library", shapes=None, counts_complex=True, priced=False)
transforms(
    "_fft_c2c.default(self, dim, normalization, forward)",
    arithmetic=Arithmetic(lambda sizes: _points(sizes, sizes.operand(), 5), nothing),
)
transforms(
    "_fft_r2c.default(self, dim, normalization, onesided)",
    arithmetic=Arithmetic(lambda sizes: _points(sizes, sizes.operand(), 2.5), nothing),
)
transforms(
    "_fft_c2r.default(self, dim, normalization, last_dim_size)",
    arithmetic=Arithmetic(lambda sizes: _points(sizes, sizes.result(), 2.5), nothing),
)
