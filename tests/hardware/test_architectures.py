"""The table of architectures against NVIDIA's assembler, and limits of devices that are not there."""

import heapq
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.anatomy.simulated import simulated
from tilewright.hardware.architectures import (
    INTERPRETER,
    Architecture,
    architecture,
    limits_of,
    reported_limits,
    stated_limits,
)
from tilewright.hardware.occupancy import Waves, occupancy
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


# Warps that fit by registers a thread: column "Warps per Multiprocessor" of NVIDIA's occupancy calculator
# for 64K registers, allocated per warp in units of 256.
WARPS_BY_REGISTERS = {32: 64, 40: 48, 48: 40, 56: 36, 64: 32, 72: 28, 80: 24, 96: 20, 112: 16, 128: 16, 168: 12, 255: 8}


@pytest.mark.parametrize(("registers", "warps"), WARPS_BY_REGISTERS.items())
@pytest.mark.parametrize("capability", ["8.0", "9.0"])
def test_warps_by_registers(capability: str, registers: int, warps: int) -> None:
    found = occupancy(architecture(capability), threads=128, registers=registers, shared_bytes=0)
    assert found.warps == min(warps // 4 * 4, 64)
    assert found.share == found.warps / 64


@pytest.mark.parametrize(
    ("capability", "threads", "registers", "shared", "blocks", "limited_by"),
    [
        # A full multiprocessor of each generation.
        ("7.5", 1024, 64, 0, 1, ("registers", "threads")),
        ("7.5", 32, 16, 0, 16, ("blocks",)),
        ("7.5", 256, 32, 16 * 1024, 4, ("shared memory", "threads")),
        ("8.0", 256, 32, 0, 8, ("registers", "threads")),
        ("8.6", 256, 32, 0, 6, ("threads",)),
        ("8.6", 32, 32, 0, 16, ("blocks",)),
        ("8.9", 32, 32, 0, 24, ("blocks",)),
        ("9.0", 32, 32, 0, 32, ("blocks",)),
        # One KiB a block is the system's: of 228 KiB, two blocks of 113 KiB fit and two of 113.5 do not.
        ("9.0", 128, 32, 113 * 1024, 2, ("shared memory",)),
        ("9.0", 128, 32, 113 * 1024 + 512, 1, ("shared memory",)),
        ("8.0", 128, 32, 163 * 1024, 1, ("shared memory",)),
        ("8.0", 128, 32, 163 * 1024 + 1, 0, ("shared memory",)),
        # 12 warps of 168 registers fill a multiprocessor: a matmul of three warpgroups.
        ("9.0", 384, 168, 200 * 1024, 1, ("registers", "shared memory")),
        ("9.0", 1024, 65, 0, 0, ("registers",)),
        ("9.0", 96, 255, 0, 2, ("registers",)),
        ("9.0", 33, 16, 0, 32, ("threads", "blocks")),
        ("9.0", 128, 256, 0, 0, ("registers",)),
        ("9.0", 1025, 16, 0, 0, ("threads",)),
    ],
)
def test_known_cases(
    capability: str, threads: int, registers: int, shared: int, blocks: int, limited_by: tuple[str, ...]
) -> None:
    found = occupancy(architecture(capability), threads, registers, shared)
    assert (found.blocks, found.limited_by) == (blocks, limited_by)


@given(
    st.sampled_from(["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]),
    st.integers(1, 1024),
    st.integers(1, 255),
    st.integers(0, 100_000),
)
def test_what_fits_fits_and_one_more_does_not(capability: str, threads: int, registers: int, shared: int) -> None:
    """Warps are placed one by one on the partitions, as the hardware must."""
    sm = architecture(capability)
    found = occupancy(sm, threads, registers, shared)
    warps = -(-threads // 32)
    fitting = sm.registers // 4 // (-(-registers * 32 // 256) * 256) * 4

    def fits(blocks: int) -> bool:
        taken = -(-(shared + sm.shared_reserved) // sm.shared_unit) * sm.shared_unit * blocks
        return (
            blocks * warps <= min(fitting, sm.max_threads // 32)
            and taken <= sm.shared_bytes
            and blocks <= sm.max_blocks
        )

    startable = shared <= sm.shared_bytes_per_block and -(-warps // 4) * 4 <= fitting
    assert found.blocks == max((n for n in range(sm.max_blocks + 1) if fits(n)), default=0) * startable
    assert found.share <= 1


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(UsageError, match="at least one thread, not 0"):
        occupancy(architecture("9.0"), 0, 32, 0)


def test_the_weighted_sum_has_under_half_a_wave() -> None:
    waves = Waves(programs=63, sms=132, blocks_per_sm=1)
    assert (waves.turns, waves.last, waves.slots) == (1, 63, 132)
    assert waves.idle == pytest.approx(69 / 132)
    assert Waves(0, 132, 4).idle == 0 and Waves(0, 132, 4).turns == 0


@given(st.integers(1, 400), st.integers(1, 12), st.integers(1, 4))
def test_turns_are_what_a_scheduler_plays_out(programs: int, sms: int, blocks: int) -> None:
    """Programs of one length, each started where a slot is free."""
    waves = Waves(programs, sms, blocks)
    free = [0] * waves.slots
    for _ in range(programs):
        heapq.heappush(free, heapq.heappop(free) + 1)
    assert max(free) == waves.turns == waves.alone_waves
    assert sum(end == waves.turns for end in free) == waves.last
    assert waves.tail(waves.alone_waves) == pytest.approx(max(free) * waves.slots / programs - 1)


@given(st.integers(1, 400), st.integers(1, 12), st.integers(1, 4))
def test_sharing_programs_are_bound_by_the_busiest_multiprocessor(programs: int, sms: int, blocks: int) -> None:
    waves = Waves(programs, sms, blocks)
    busiest = max(len(range(sm, programs, sms)) for sm in range(sms))
    assert waves.shared_waves == busiest / blocks
    assert waves.waves <= waves.shared_waves + 1e-9 and waves.shared_waves <= waves.alone_waves
