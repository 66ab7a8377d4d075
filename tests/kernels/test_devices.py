"""Operators compiled ahead for GPUs that are not there: none spills, and each takes Triton's form where it must.

Attention has tests of its own.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.kernels.devices import limits
from tests.kernels.nvcc import build
from tilewright.anatomy.capture import TritonLaunch, capturing, capturing_cuda, launch_record
from tilewright.anatomy.launch_targets import of_operator
from tilewright.anatomy.simulated import CUDA, simulated
from tilewright.bench.catalogue import suite
from tilewright.hardware.profiles import profile_for
from tilewright.kernels.cross_entropy import cuda as cross_entropy
from tilewright.kernels.linear import cuda as linear
from tilewright.kernels.norm import cuda as norm
from tilewright.kernels.norm.cuda import Direction, schedule_of
from tilewright.kernels.row import ELEMENTS, Alignment, RowLayout
from tilewright.kernels.row_schedule import Schedule, no_kernel
from tilewright.kernels.softmax import cuda as softmax
from tilewright.launch import nvrtc

pytest.importorskip("triton")
OTHERS = ["8.0", "10.0", "12.0"]
BF16, FP32 = torch.bfloat16, torch.float32
ROWS = (64, 9000)
OF_ROWS = ("softmax", "log_softmax", "layer_norm", "rms_norm", "add_layer_norm")
SIZES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("gelu", "swiglu", "dropout_add", "weighted_sum", *OF_ROWS), (64, 512)),
    "linear_dropout_add": (256, 256, 64),
    "linear_cross_entropy": (64, 128, 256),
}
"""Operators whose own kernels are Triton's; softmax and norms of rows of this length are generated."""
BY_CLUSTERS = ["layer_norm", "softmax", "cross_entropy"]
"""Operators that have CUDA C++ beside, for GPUs with clusters; a norm with an addition asks where the norm does."""
WITHOUT_SHORT_BF16 = ("gelu", "weighted_sum", "softmax", "log_softmax", "layer_norm", "rms_norm")
ON_HOPPER = [
    *((name, "tilewright", SIZES[name], "bfloat16") for name in SIZES if name not in WITHOUT_SHORT_BF16),
    *((name, "tilewright", SIZES[name], "float32") for name in ("gelu", "weighted_sum", "layer_norm")),
    ("cross_entropy", "tilewright-triton", (4096, 256), "bfloat16"),
    ("softmax", "tilewright", (64, 8192), "bfloat16"),
    ("cross_entropy", "tilewright-triton", (64, 50256), "bfloat16"),
]
"""Generated operators of one kind share the dtypes and the lengths of rows."""
ELSEWHERE = [
    *(("softmax", "8.0"), ("dropout_add", "10.0"), ("linear_dropout_add", "12.0"), ("linear_cross_entropy", "10.0")),
]
"""Operators on other architectures; of generated ones two, as `tests/emit/machine_code.py` has each form of them."""


def launched(
    name: str, impl: str, sizes: tuple[int, ...], dtype: str, profile: str, capability: str
) -> list[TritonLaunch]:
    """Triton's launches of a forward and a backward; there is no other, and no kernel spills."""
    found = suite(name)
    subject = of_operator(found, found.workload(sizes, dtype), found.variant(impl), "bwd")
    profiled = replace(profile_for(profile), capability=capability)
    with simulated(profiled, capability), capturing(run=False) as triton, capturing_cuda(capability, run=False) as cpp:
        for _ in subject.stages(CUDA, torch.Generator()):
            pass
    records = [launch_record(captured, sass=False) for captured in triton]
    assert records and {record.capability for record in records} == {capability} and cpp == []
    assert {record.name: record.stack_bytes for record in records if record.stack_bytes} == {}
    return triton


@pytest.mark.parametrize(("name", "capability"), ELSEWHERE)
def test_each_operator_has_kernels_for_other_architectures(name: str, capability: str) -> None:
    launched(name, "tilewright", SIZES[name], "bfloat16", "a100", capability)


@pytest.mark.parametrize("name", BY_CLUSTERS)
def test_without_clusters_triton_takes_the_rows(name: str) -> None:
    launched(name, "tilewright", ROWS, "bfloat16", "a100", "8.0")
    with simulated(replace(profile_for("a100"), capability="8.0"), "8.0"):
        assert no_kernel(CUDA) == "compute capability 8.0 has no thread-block clusters"


@pytest.mark.parametrize(("name", "impl", "sizes", "dtype"), ON_HOPPER)
def test_on_hopper_vectors_are_moved(name: str, impl: str, sizes: tuple[int, ...], dtype: str) -> None:
    found = launched(name, impl, sizes, dtype, "h200", "9.0")
    assert any("ld.global.v4.b32" in one.compiled.asm["ptx"] for one in found)
    if name == "dropout_add":
        # Each thread draws the words of its own elements.
        assert not any("convert_layout" in one.compiled.asm["ttgir"] for one in found)


@pytest.mark.parametrize("capability", OTHERS)
def test_the_linear_layer_says_why_it_is_not_fused(capability: str) -> None:
    with simulated(replace(profile_for("a100"), capability=capability), capability):
        why = linear.refuses(*(torch.empty(256, 64, dtype=BF16) for _ in range(2)))
    assert why == f"compute capability {capability} lacks the matrix instructions of a warpgroup (wgmma)"


# CUDA C++ of rows.

NORMS: list[tuple[str, Direction, int, torch.dtype]] = [
    ("9.0", "forward", 5000, BF16), ("9.0", "forward", 32768, BF16), ("9.0", "backward", 8192, BF16),
    ("9.0", "backward", 16384, FP32), ("10.0", "backward", 32768, BF16),
    ("12.0", "forward", 32768, BF16), ("12.0", "backward", 5000, BF16),
]  # fmt: skip
SOFTMAXES = [
    # capability, direction, columns, dtype, address, whether of logarithms
    ("9.0", "forward", 9000, BF16, 4, 0), ("9.0", "forward", 256000, FP32, 0, 1),
    ("9.0", "backward", 9000, BF16, 4, 1), ("9.0", "backward", 200000, FP32, 4, 0),
    ("10.0", "forward", 100000, BF16, 0, 0), ("12.0", "backward", 50000, BF16, 0, 0),
]  # fmt: skip
CROSS_ENTROPIES = [
    # capability, direction, columns, dtype, dtype of the gradient, alignment
    ("9.0", "forward", 64, FP32, FP32, "SHIFTED"), ("9.0", "forward", 1024, FP32, FP32, "SHIFTED"),
    ("9.0", "forward", 131072, BF16, BF16, "SHIFTED"), ("9.0", "backward", 64, BF16, BF16, "SHIFTED"),
    ("9.0", "backward", 300, FP32, FP32, "ALIGNED"), ("9.0", "backward", 131072, FP32, FP32, "SHIFTED"),
    ("10.0", "forward", 256, BF16, BF16, "ALIGNED"), ("12.0", "forward", 50257, BF16, BF16, "SHIFTED"),
    ("12.0", "backward", 256, BF16, FP32, "ALIGNED"),
]  # fmt: skip
"""Pairs of length, dtype, alignment and architecture in both directions: a build takes a second."""


def assert_fits(found: Schedule, source: Path, entry: str, definitions: nvrtc.Definitions, capability: str) -> None:
    """A build asks for no more than the device has, and compiles without spills."""
    device = limits(capability)
    assert found.cluster <= device.largest_cluster and found.shared_bytes <= device.shared_bytes_per_block
    assert build(source, (*found.definitions(), *definitions), capability, entry).spilled == {entry: 0}


@pytest.mark.parametrize(("capability", "direction", "columns", "dtype"), NORMS)
def test_norms_do_not_spill(capability: str, direction: Direction, columns: int, dtype: torch.dtype) -> None:
    """Layer norm with weight and bias, which has the most to keep in registers."""
    call = norm.contiguous(direction, 5000, columns, dtype, 1 if direction == "forward" else 2, 2, True)
    found = schedule_of(call, limits(capability))
    assert isinstance(found, Schedule)
    source, entry, _ = norm.SOURCES[direction, found.storage]
    assert_fits(found, norm.HERE / source, entry, call.definitions(), capability)


def test_rows_that_a_device_cannot_hold_are_tritons() -> None:
    call = norm.contiguous("backward", 5000, 131072, FP32, 2, 2, True)
    assert isinstance(schedule_of(call, limits("9.0")), Schedule)
    assert schedule_of(call, limits("12.0")) == "no kernel holds rows of 131072 columns"


def test_rows_of_16_bits_have_both_kernels_or_none() -> None:
    """The gradient of a row of one value is 0 with the rstd of the forward kernel alone."""
    for columns in (65536, 65544, 131072):
        forward, backward = (
            schedule_of(norm.contiguous(direction, 5000, columns, BF16, inputs, 2, True), limits("9.0"))
            for direction, inputs in (("forward", 1), ("backward", 2))
        )
        assert isinstance(forward, Schedule) == isinstance(backward, Schedule) == (columns == 65536)


@pytest.mark.parametrize(("capability", "direction", "columns", "dtype", "address", "log"), SOFTMAXES)
def test_softmax_does_not_spill(
    capability: str, direction: softmax.Direction, columns: int, dtype: torch.dtype, address: int, log: int
) -> None:
    layouts = (RowLayout(address, 50, columns),) * (2 if direction == "forward" else 3)
    found = softmax.schedule_of(direction, columns, dtype, layouts, False, limits(capability))
    assert_fits(found, softmax.SOURCE, direction, (("ELEMENT", ELEMENTS[dtype]), ("LOG", log)), capability)


@pytest.mark.parametrize(("capability", "direction", "columns", "dtype", "gradient", "alignment"), CROSS_ENTROPIES)
def test_cross_entropy_does_not_spill(
    capability: str, direction: str, columns: int, dtype: torch.dtype, gradient: torch.dtype, alignment: Alignment
) -> None:
    schedules = {"forward": cross_entropy.forward_schedule, "backward": cross_entropy.backward_schedule}
    found = schedules[direction](columns, dtype.itemsize, alignment)
    types = ("ELEMENT", ELEMENTS[dtype]), ("GRADIENT", ELEMENTS[gradient]), ("SMOOTH", 0)
    assert_fits(found, cross_entropy.SOURCE, direction, types, capability)
