"""A user's own suite: sizes by name, and bytes and FLOPs as counted by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.measure.racing.race import Race
from tilewright.measure.racing.user_suite import user_suite
from tilewright.records.errors import UsageError
from tilewright.records.suite import Work


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


def test_bytes_and_flops_of_a_product() -> None:
    suite = user_suite(
        "mine", {"mine": F.linear}, "bf16[T=64,K=32],bf16[V=128,K=32]", reference=linear, directions=("fwd", "bwd")
    )
    work = suite.workload((4096, 2048, 8192), "bfloat16").work
    inputs, output, product = 2 * (4096 * 2048 + 8192 * 2048), 2 * 4096 * 8192, 2 * 4096 * 2048 * 8192
    assert work["fwd"] == Work(inputs + output, product, "matmul")
    assert work["bwd"] == Work(2 * inputs + output, 2 * product, "matmul")
    assert suite.sizes == [(64, 32, 128)] and suite.dtypes == ("bfloat16",)


def test_what_is_given_is_not_derived() -> None:
    suite = user_suite("mine", {"a": F.silu}, "fp32[N=8,M=4]", reference=F.silu, nbytes=7, flops=3)
    assert suite.workload((8, 4), "float32").work["fwd"] == Work(7, 3, "copy")


def test_inputs_have_the_sizes_and_dtypes_asked_for() -> None:
    suite = user_suite("rows", {"take": lambda x, i: x[i]}, "fp32[N=8,M=4],i64[K=3]", reference=lambda x, i: x[i])
    workload = suite.workload((16, 2, 5), "bfloat16")
    x, index = workload.make(torch.device("cpu"), torch.Generator().manual_seed(0))
    assert (x.shape, x.dtype, x.requires_grad) == ((16, 2), torch.bfloat16, True)
    assert (index.shape, index.dtype) == ((5,), torch.int64)
    assert workload.name == "N16 M2 K5 bfloat16"


@pytest.mark.parametrize(("names", "variants"), [(["a"], ["a", "eager"]), (["a", "torch"], ["a", "torch"])])
def test_the_reference_races_along_unless_there_is_a_yardstick(names: list[str], variants: list[str]) -> None:
    suite = user_suite("silu", dict.fromkeys(names, F.silu), "fp32[N=8]", reference=lambda x: x * x.sigmoid())
    assert [variant.name for variant in suite.variants] == variants
    outcomes, _ = Race(suite, suite.workload((8,), "float32"), "fwd", seconds=0.02, min_repeats=3).run(suite.variants)
    assert all(outcome.refusal is None for outcome in outcomes)


def test_misuse_is_named() -> None:
    with pytest.raises(UsageError, match="no function was given"):
        user_suite("mine", {}, "fp32[N=8]", reference=F.silu)
    suite = user_suite("mine", {"a": F.silu}, "fp32[N=8,M=4]", reference=F.silu)
    with pytest.raises(UsageError, match="mine has the sizes N, M, not 1"):
        suite.workload((8,), "float32")
