"""The numbers contract on every example, compiled, at odd sizes: outputs and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.contract import SMALL, check

FLASH_KEY_BIAS = (
    "the true gradient of a key's bias is zero; flash attention forms the row sums of its backward from the "
    "output rounded to bf16, so what cancels in eager does not quite cancel there"
)


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("example", SMALL)
def test_example_keeps_the_numbers_contract(example: str, dtype: str, training: bool, contiguous: bool) -> None:
    verified = check(replace(SMALL[example](dtype), training=training), "cpu", contiguous)
    broken = {f"{v.direction} {v.tensor}" for v in verified if not v.ok}
    assert any(v.direction == "bwd" for v in verified) == training
    if broken == {"bwd key.bias"} and dtype == "bf16":
        pytest.xfail(FLASH_KEY_BIAS)
    assert not broken, [v for v in verified if not v.ok]
