"""Softmax and log-softmax in Triton's interpreter, against float64 by the numbers contract."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.kernels.rows import LAYOUTS, SPECIALS, layout
from tests.proving import prove
from tilewright.bench.suites.softmax import SUITES
from tilewright.kernels import by_recipe
from tilewright.kernels.softmax import by_impl
from tilewright.kernels.softmax import triton as kernels

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that no program holds, at a length the interpreter can take."""
    monkeypatch.setattr(kernels, "BLOCK", 1024)
    monkeypatch.setattr(kernels, "STEP", 256)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*LAYOUTS, *SPECIALS])
def test_numbers_contract(name: str, dtype: torch.dtype, case: str) -> None:
    x = layout(case, dtype, torch.device("cpu")).requires_grad_()
    ours = functools.partial(by_impl, log=name == "log_softmax", impl="triton")
    assert [row for row in prove(SUITES[name], ours, [x]) if not row.ok] == []


def test_fp16() -> None:
    x = layout("3x1031", torch.float16, torch.device("cpu")).requires_grad_()
    ours = functools.partial(by_impl, log=False, impl="triton")
    assert [row for row in prove(SUITES["softmax"], ours, [x]) if not row.ok] == []


def test_auto_is_triton_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(kernels, "forward", lambda call, x, y, log: taken.append(call.fill(y, 0)))
    by_recipe._built.cache_clear()
    assert by_impl(torch.randn(3, 5), log=False).eq(0).all()
    by_recipe._built.cache_clear()
    assert taken
