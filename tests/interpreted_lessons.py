"""A student's Triton kernels as `tilewright check` runs them without a GPU."""

from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from examples.lessons.interpreter import install
from examples.lessons.operators import grade
from tilewright.records.errors import VerificationError


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter of lessons; others of this process have their own after it."""
    builder = interpreter.InterpreterBuilder
    for owner, name in (
        (interpreter, "_convert_float"),
        (interpreter, "_patch_lang_tensor"),
        (interpreter.GridExecutor, "_init_args_hst"),
        (builder, "create_masked_load"),
        (builder, "create_masked_store"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    install()
    yield


@triton.jit
def online(x, y, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    row = tl.program_id(0) * n
    top, total = -float("inf"), 0.0
    for begin in range(0, n, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        v = tl.load(x + row + at, mask=at < n, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(v, 0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(v - new), 0)
        top = new
    for begin in range(0, n, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        v = tl.load(x + row + at, mask=at < n, other=-float("inf")).to(tl.float32)
        tl.store(y + row + at, tl.exp(v - top) / total, mask=(at < n) if MASKED else (at < n + BLOCK))


def softmax(x: Tensor, *, masked: bool) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    online[(len(x),)](x, y, x.shape[1], BLOCK=256, MASKED=masked)
    return y


def test_a_loop_up_to_an_argument_and_one_rounding_are_right(patched: None) -> None:
    *_, last = grade("softmax", lambda x: softmax(x, masked=True))
    assert last.startswith("softmax is right on all 8")


def test_a_store_behind_the_last_row_is_refused(patched: None) -> None:
    with pytest.raises(
        VerificationError, match=r"line 46 writes 21 elements outside of its tensors: a mask is missing"
    ):
        list(grade("softmax", lambda x: softmax(x, masked=False)))
