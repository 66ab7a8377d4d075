"""Which functions a generated Triton kernel may approximate: those of operators that eager rounds to 16 bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.passes.graphs import aten
from tilewright.emit.triton import emit_triton
from tilewright.hardware.target import target_named
from tilewright.passes.fusion import fuse


def source(function: Callable[..., Any], dtype: torch.dtype) -> str:
    (region,) = fuse(aten(function, torch.randn(64, 96).to(dtype)), "forward", target_named("h200")).regions
    return emit_triton(region.lowered.nest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_silu_of_16_bits_takes_the_hardwares_functions(dtype: torch.dtype) -> None:
    text = source(lambda x: F.silu(x), dtype)
    assert "tw.exp_approximate(" in text and " / " in text and "div_rn" not in text


@pytest.mark.parametrize(("function", "name"), [(F.elu, "expm1"), (F.softplus, "log1p")])
def test_an_activation_of_16_bits_takes_no_function_of_libdevice(function: Callable[..., Any], name: str) -> None:
    assert f"tw.{name}_approximate(" in source(lambda x: function(x), torch.bfloat16)
    assert f"libdevice.{name}(" in source(lambda x: function(x), torch.float32)


def test_an_fp32_softmax_that_is_only_rounded_takes_them_too() -> None:
    text = source(lambda x: (2 * F.softmax(x.float(), -1)).to(x.dtype), torch.bfloat16)
    assert "tw.exp_approximate(" in text and "div_rn" not in text and "float64" not in text


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: F.silu(x), torch.float32),
        (lambda x: F.silu(x.float()), torch.bfloat16),
        (lambda x: F.silu(x) > 0.5, torch.bfloat16),
        (lambda x: F.silu(x) + F.silu(x.float()), torch.bfloat16),
        (lambda x: (F.silu(x.float()) - 1).to(x.dtype), torch.bfloat16),
    ],
    ids=["fp32", "widened", "compared", "shared", "subtracted"],
)
def test_other_results_are_accurate(function: Callable[..., Any], dtype: torch.dtype) -> None:
    text = source(function, dtype)
    assert "approximate" not in text and "tw.exp(" in text and "tl.div_rn(" in text
