"""The numbers contract on every example, compiled, at odd sizes: outputs and gradients."""

from dataclasses import replace

import pytest

from benchmarks.contract import SMALL, check


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("example", SMALL)
def test_example_keeps_the_numbers_contract(example: str, dtype: str, training: bool, contiguous: bool) -> None:
    verified = check(replace(SMALL[example](dtype), training=training), "cpu", contiguous)
    assert any(v.direction == "bwd" for v in verified) == training
    assert [v for v in verified if not v.ok] == []
