"""Norms, softmax and cross entropy on architectures that are not there: CUDA C++ compiles, or Triton's form does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.kernels.devices import limits
from tests.kernels.nvcc import spilled
from tilewright.anatomy.capture import capturing, launch_record
from tilewright.anatomy.cuda import capturing_cuda
from tilewright.anatomy.launch_targets import of_operator
from tilewright.anatomy.simulated import CUDA, simulated
from tilewright.bench.catalogue import suite
from tilewright.hardware.profiles import profile_for
from tilewright.kernels.cross_entropy import cuda as cross_entropy
from tilewright.kernels.norm import cuda as norm
from tilewright.kernels.norm.cuda import Direction, schedule_of
from tilewright.kernels.row import ELEMENTS, RowLayout
from tilewright.kernels.row_schedule import Schedule, no_kernel
from tilewright.kernels.softmax import cuda as softmax
from tilewright.launch import nvrtc

pytest.importorskip("triton")
WITH_CLUSTERS = ["10.0", "12.0"]
NAMES = ["layer_norm", "rms_norm", "add_layer_norm", "softmax", "log_softmax", "cross_entropy"]
BF16 = torch.bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_without_clusters_triton_takes_the_rows_and_says_so(name: str) -> None:
    found = suite(name)
    subject = of_operator(found, found.workload((64, 1000), "bfloat16"), found.variants[0], "bwd")
    profile = replace(profile_for("a100"), capability="8.0")
    with simulated(profile, "8.0"), capturing(run=False) as triton, capturing_cuda("8.0", run=False) as cpp:
        assert no_kernel(CUDA) == "compute capability 8.0 has no thread-block clusters"
        for _ in subject.stages(CUDA, torch.Generator()):
            pass
    records = [launch_record(captured) for captured in triton]
    assert records and {record.capability for record in records} == {"8.0"}
    assert {record.name: record.stack_bytes for record in records if record.stack_bytes} == {}
    assert cpp == []


def fits(found: Schedule, source: Path, entry: str, definitions: nvrtc.Definitions, capability: str) -> None:
    """Asserts that a build asks for no more than the device has, and that it compiles without spills."""
    device = limits(capability)
    assert found.cluster <= device.largest_cluster and found.shared_bytes <= device.shared_bytes_per_block
    assert spilled(source, (*found.definitions(), *definitions), capability)[entry] == 0


@pytest.mark.parametrize("capability", WITH_CLUSTERS)
@pytest.mark.parametrize("direction, columns", [
    ("forward", 5000), ("forward", 32768), ("backward", 384), ("backward", 1024), ("backward", 5000),
    ("backward", 32768),
])  # fmt: skip
def test_norms_compile(direction: Direction, columns: int, capability: str) -> None:
    call = norm.contiguous(direction, 5000, columns, BF16, 1 if direction == "forward" else 2, 2, True)
    found = schedule_of(call, limits(capability))
    assert isinstance(found, Schedule)
    source, entry, _ = norm.SOURCES[direction, found.storage]
    fits(found, norm.HERE / source, entry, call.definitions(), capability)


def test_rows_that_a_device_cannot_hold_are_tritons() -> None:
    call = norm.contiguous("backward", 5000, 262144, BF16, 2, 2, True)
    assert isinstance(schedule_of(call, limits("9.0")), Schedule)
    assert schedule_of(call, limits("12.0")) == "no kernel holds rows of 262144 columns"


@pytest.mark.parametrize("capability", WITH_CLUSTERS)
@pytest.mark.parametrize("direction, columns", [("forward", 5000), ("forward", 100000), ("backward", 50000)])
def test_softmax_compiles(direction: softmax.Direction, columns: int, capability: str) -> None:
    layouts = (RowLayout(0, 50, columns),) * 2
    found = softmax.schedule_of(direction, columns, BF16, layouts, False, limits(capability))
    definitions = (("ELEMENT", ELEMENTS[BF16]), ("LOG", 0))
    fits(found, softmax.SOURCE, direction, definitions, capability)


@pytest.mark.parametrize("capability", WITH_CLUSTERS)
@pytest.mark.parametrize("columns", [256, 50257])
def test_cross_entropy_compiles(columns: int, capability: str) -> None:
    found = cross_entropy.forward_schedule(columns, 2, "PEELED")
    definitions = (("ELEMENT", ELEMENTS[BF16]), ("GRADIENT", ELEMENTS[BF16]), ("SMOOTH", 0))
    fits(found, cross_entropy.SOURCE, "forward", definitions, capability)
    found = cross_entropy.backward_schedule(columns, 2, "PEELED")
    fits(found, cross_entropy.SOURCE, "backward", definitions, capability)
