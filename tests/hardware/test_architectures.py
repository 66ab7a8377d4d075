"""The table of architectures against NVIDIA's assembler, and limits of devices that are not there."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tilewright.anatomy.simulated import simulated
from tilewright.hardware.architectures import (
    INTERPRETER,
    Architecture,
    architecture,
    limits_of,
    reported_limits,
    stated_limits,
)
from tilewright.hardware.profiles import profile_for
from tilewright.records.errors import UsageError

KNOWN = ("7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")
"""Compute capabilities that CUDA 13 supports."""
PTX = {
    "clusters": ".visible .entry e() .reqnctapercluster 2,1,1 { barrier.cluster.arrive; barrier.cluster.wait; ret; }",
    "tensor copies": """.visible .entry e() {
        .reg .b32 %r<3>; .reg .b64 %a; .shared .b64 bar; .shared .align 128 .b8 tile[128];
        cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [%a, {%r2}], [bar];
        ret; }""",
    "wgmma": ".visible .entry e() { wgmma.fence.sync.aligned; ret; }",
}
HAS: dict[str, Callable[[Architecture], bool]] = {
    "clusters": lambda row: row.max_cluster > 1,
    "tensor copies": lambda row: row.tensor_copies,
    "wgmma": lambda row: row.wgmma,
}


def assembles(body: str, target: str, folder: Path) -> bool:
    """Whether ptxas takes `body` for `target`; a refusal must be about the architecture."""
    source = folder / "e.ptx"
    source.write_text(f".version 9.0\n.target {target}\n.address_size 64\n{body}\n")
    ptxas = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")
    if ptxas is None:
        pytest.skip("no ptxas: CUDA's compiler is not installed")
    command = [ptxas, f"-arch={target}", str(source), "-o", str(folder / "e.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "is not defined for option 'gpu-name'" in done.stderr:
        pytest.skip(f"this ptxas is older than {target}")
    assert done.returncode == 0 or "requires .target" in done.stderr or "not supported on .target" in done.stderr
    return done.returncode == 0


@pytest.mark.parametrize("capability", KNOWN)
@pytest.mark.parametrize("feature", PTX)
def test_features_are_those_that_the_assembler_takes(capability: str, feature: str, tmp_path: Path) -> None:
    found = architecture(capability)
    assert assembles(PTX[feature], found.target, tmp_path) == HAS[feature](found)


def test_only_clusters_beyond_eight_must_be_asked_for() -> None:
    sizes = {name: (architecture(name).max_cluster, architecture(name).largest_cluster) for name in KNOWN}
    assert sizes["8.9"] == (1, 1) and sizes["9.0"] == (8, 16) and sizes["12.0"] == (8, 8)


def test_an_unknown_capability_is_said() -> None:
    with pytest.raises(UsageError, match=r"'3.5' is not known, only 7.0, 7.2, 7.5"):
        architecture("3.5")


def test_limits_stated_and_reported_agree() -> None:
    """A simulated device answers as PyTorch does on a real one."""
    for name in ("h200", "h100", "b200", "a100", "l40s", "rtx4090", "rtx5090", "2080ti"):
        profile = profile_for(name)
        assert profile.capability is not None
        with simulated(profile, profile.capability):
            assert limits_of(torch.device("cuda:0")) == profile.limits
    assert profile_for("cpu").limits is None


def test_a_device_that_the_table_lacks_has_its_own_limits_and_no_features() -> None:
    properties = SimpleNamespace(
        major=99,
        minor=1,
        multi_processor_count=7,
        shared_memory_per_multiprocessor=1000,
        shared_memory_per_block_optin=900,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        L2_cache_size=2**20,
        warp_size=32,
    )
    limits = reported_limits(properties)
    assert (limits.capability, limits.multiprocessors, limits.shared_bytes_per_block) == ("99.1", 7, 900)
    assert (limits.max_cluster, limits.largest_cluster, limits.tensor_copies, limits.wgmma) == (1, 1, False, False)
    with pytest.raises(UsageError, match=r"'99.1' is not known"):
        stated_limits("99.1", 7, 2**20)


def test_the_cpu_interprets() -> None:
    assert limits_of(torch.device("cpu")) == INTERPRETER
