"""The rotary embedding's Triton kernel in Triton's interpreter."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.kernels.interpreter import install
from tilewright.bench.suites.rotary import SUITES
from tilewright.kernels.rotary import reference, rotary
from tilewright.measure.truth.proof import prove

install()
SIZES = [(1, 1, 1, 1, 2), (2, 5, 3, 1, 12), (1, 2, 40, 5, 128), (1, 2, 2, 2, 26), (0, 3, 2, 2, 8)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_contract_is_kept(sizes: tuple[int, ...], dtype: str, interleaved: bool) -> None:
    suite = SUITES["rotary"]
    q, k, cos, sin = suite.workload(sizes, dtype).make(torch.device("cpu"), torch.Generator().manual_seed(0))
    inputs = (q, k, cos, sin, interleaved)
    rows = prove(suite, lambda *given: rotary(*given[:4], interleaved=given[4]), inputs)
    assert [row for row in rows if not row.ok] == []


@pytest.mark.parametrize("interleaved", [False, True])
def test_layouts_of_q_and_k(interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator)
    cos, sin = draw(5, 12)[:, :6], draw(6, 5).t()
    ways = [draw(2, 3, 5, 12), draw(2, 5, 3, 12).transpose(1, 2), draw(2, 3, 5, 40)[..., 5:17], draw(2, 3, 12, 5).mT]
    ways.append(draw(2, 3, 16).unfold(2, 12, 1))
    for q in ways:
        for k in ways:
            found = rotary(q, k, cos, sin, interleaved=interleaved)
            for mine, true in zip(found, reference.rotary(q, k, cos, sin, interleaved), strict=True):
                torch.testing.assert_close(mine, true, rtol=1e-6, atol=1e-6)
