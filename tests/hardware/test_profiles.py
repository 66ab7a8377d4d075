"""Shipped figures against arithmetic on clocks and widths, and profiles made of measured ceilings."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tilewright.hardware import ceilings as measured
from tilewright.hardware import profiles
from tilewright.hardware.datasheet import datasheet_of, pcie_GBps
from tilewright.hardware.detect import Cpu, Gpu, Machine, detect
from tilewright.hardware.profiles import (
    local_ceilings,
    local_profile,
    measured_profile,
    profile_for,
    remeasured_profile,
)
from tilewright.hardware.summary import machine_record, machine_report
from tilewright.records import errors
from tilewright.records.errors import UsageError
from tilewright.records.measurement import Ceiling

ROOT = Path(__file__).parents[2]
MACHINE = Machine(
    cpu=Cpu("Toy CPU", 4, 8, ("avx2",), 32 * 1024, 1024**2, 16 * 1024**2),
    gpus=(),
    ram_bytes=32 * 1024**3,
    driver=None,
    driver_cuda=None,
    cuda=None,
    os=None,
    kernel="6.1",
    python="3.11.2",
    torch="2.13.0",
    triton=None,
)
GPU = Gpu("NVIDIA GeForce RTX 2080 Ti", "7.5", 11 * 1024**3, 5632 * 1024, 68, 1024, 65536, 65536, "PCIe 3 x16")


def toy_ceilings(device: str = "Toy CPU") -> list[Ceiling]:
    figures = [
        ("copy", "float32", 40.0, "GB/s"),
        ("read", "float32", 30.0, "GB/s"),
        ("write", "float32", 20.0, "GB/s"),
        ("cache", "float32", 200.0, "GB/s"),
        ("matmul", "float32", 0.5, "TFLOP/s"),
        ("matmul", "bfloat16", 1.5, "TFLOP/s"),
        ("vector", "float32", 0.5, "TFLOP/s"),
        ("launch", "", 1.25, "us"),
        ("first touch", "float32", 3.0, "GB/s"),
    ]
    return [Ceiling(device, kind, dtype, value, unit, "measured") for kind, dtype, value, unit in figures]


@pytest.mark.parametrize(
    ("name", "driver_name", "sms", "fp32_lanes", "boost_GHz", "pins", "Gbps"),
    [
        ("h200", "NVIDIA H200", 132, 128, 1.98, 6144, 6.25),
        ("h100", "NVIDIA H100 80GB HBM3", 132, 128, 1.98, 5120, 5.235),
        ("b200", "NVIDIA B200", 148, 128, 1.98, 8192, 7.8125),
        ("l40s", "NVIDIA L40S", 142, 128, 2.52, 384, 18.0),
        ("rtx5090", "NVIDIA GeForce RTX 5090", 170, 128, 2.407, 512, 28.0),
        ("mi300x", "AMD Instinct MI300X", 304, 128, 2.1, 8192, 5.2),
        ("mi250", "AMD Instinct MI250", 104, 64, 1.7, 8192 // 2, 3.2),
        ("mi355x", "AMD Instinct MI355X", 256, 128, 2.4, 8192, 7.8125),
        ("a100", "NVIDIA A100-SXM4-80GB", 108, 64, 1.41, 5120, 3.186),
        ("rtx4090", "NVIDIA GeForce RTX 4090", 128, 128, 2.52, 384, 21.0),
        ("2080ti", "NVIDIA GeForce RTX 2080 Ti", 68, 64, 1.545, 352, 14.0),
    ],
)
def test_datasheets_agree_with_clocks_and_widths(
    name: str, driver_name: str, sms: int, fp32_lanes: int, boost_GHz: float, pins: int, Gbps: float
) -> None:
    sheet = datasheet_of(driver_name)
    assert sheet is not None
    assert sheet.vector_TFLOPs == pytest.approx(2 * sms * fp32_lanes * boost_GHz / 1e3, rel=0.01)
    # Nobody states it for Turing and CDNA 4.
    assert name in ("2080ti", "mi355x") or sheet.shared_GBps == pytest.approx(sms * 128 * boost_GHz, rel=0.001)
    assert sheet.dram_GBps == pytest.approx(pins / 8 * Gbps, rel=0.01)
    profile = profile_for(name)
    assert profile.sms == sms
    if profile.origin == "datasheet":
        assert (profile.vector_TFLOPs, profile.copy_GBps) == (sheet.vector_TFLOPs, sheet.dram_GBps)
        assert profile.flops_per_transcendental == 2 * fp32_lanes // 16


def test_the_h200_is_as_it_was_measured() -> None:
    """No ceiling is below what `tilewright doctor` found on one, or floors would be too high; nor far above."""
    found = json.loads((ROOT / "benchmarks" / "results" / "h200" / "doctor.json").read_text())
    values = {(row["kind"], row["dtype"]): row["value"] for row in found["ceilings"]}
    h200 = profile_for("H200")
    shipped = {
        ("copy", "float32"): h200.copy_GBps,
        ("read", "float32"): h200.read_GBps,
        ("write", "float32"): h200.write_GBps,
        ("cache", "float32"): h200.l2_GBps,
        ("cache read", "float32"): h200.l2_read_GBps,
        ("cache write", "float32"): h200.l2_write_GBps,
        ("vector", "float32"): h200.vector_TFLOPs,
        **{("matmul", dtype): rate for dtype, rate in h200.matmul_TFLOPs.items() if ("matmul", dtype) in values},
    }
    assert len(shipped) == 11
    for kind, rate in shipped.items():
        assert rate is not None and 0.99 < rate / values[kind] < 1.06, kind
    assert 0.9 < h200.launch_us / values["launch in a graph", ""] < 1.01
    assert (h200.l2_bytes, h200.sms, h200.origin) == (found["machine"]["gpus"][0]["l2_bytes"], 132, "measured")


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"'h300'; known: h200, h100, b200, a100, .*, cpu"):
        profile_for("h300")


def test_a_driver_name_finds_no_other_datasheet() -> None:
    assert datasheet_of("NVIDIA A100-SXM4-40GB") is None


def test_links() -> None:
    """PCIe 4 x16 is sold as 31.5 GB/s, PCIe 3 x8 as 7.88."""
    assert pcie_GBps("PCIe 4 x16") == pytest.approx(31.5, rel=0.001)
    assert pcie_GBps("PCIe 3 x8") == pytest.approx(7.88, rel=0.001)
    assert pcie_GBps("PCIe 9 x16") is None and pcie_GBps("NVLink") is None


def test_a_measured_cpu_profile() -> None:
    profile = measured_profile(MACHINE, toy_ceilings())
    assert (profile.name, profile.device, profile.origin) == ("Toy CPU", "cpu", "measured")
    assert (profile.copy_GBps, profile.read_GBps, profile.write_GBps) == (40.0, 30.0, 20.0)
    assert (profile.l2_GBps, profile.l2_bytes) == (200.0, 16 * 1024**2)
    assert dict(profile.matmul_TFLOPs) == {"float32": 0.5, "bfloat16": 1.5}
    assert (profile.vector_TFLOPs, profile.launch_us) == (0.5, 1.25)
    assert (profile.sms, profile.limits) == (8, None)


def test_a_measured_gpu_profile() -> None:
    """Its shape is the card's, and its cache may have rates of its own for reading and writing."""
    rates = (("cache read", 2000.0), ("cache write", 1000.0))
    ways = [Ceiling(GPU.name, kind, "float32", value, "GB/s", "measured") for kind, value in rates]
    profile = measured_profile(replace(MACHINE, gpus=(GPU,)), toy_ceilings(GPU.name) + ways)
    assert (profile.l2_GBps, profile.l2_read_GBps, profile.l2_write_GBps) == (200.0, 2000.0, 1000.0)
    assert (profile.device, profile.sms, profile.l2_bytes) == ("cuda", 68, 5632 * 1024)
    limits = profile.limits
    assert limits is not None and (limits.max_threads, limits.registers) == (1024, 65536)
    assert limits.shared_bytes == limits.shared_bytes_per_block == 64 * 1024
    assert profile.flops_per_transcendental == 8


def test_missing_ceilings_are_named() -> None:
    some = [ceiling for ceiling in toy_ceilings() if ceiling.kind not in ("launch", "copy")]
    with pytest.raises(UsageError, match="lack copy, launch"):
        measured_profile(MACHINE, some)


@pytest.fixture
def home(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and a CPU whose ceilings come at once."""
    taken: list[int] = []

    def measure(device: str, *, machine: Machine) -> list[Ceiling]:
        taken.append(1)
        scale = len(taken)
        return [
            replace(ceiling, device=measured.device_name(machine, device), value=ceiling.value * scale)
            for ceiling in toy_ceilings()
        ]

    monkeypatch.setattr(measured, "measure_ceilings", measure)
    return home


def test_a_local_profile_is_measured_once_and_again_on_demand(home: Path) -> None:
    machine, kept = local_ceilings(device="cpu")
    assert {ceiling.device for ceiling in kept} == {machine.cpu.model or "CPU"}
    assert local_profile(device="cpu").copy_GBps == 40.0
    assert local_profile(device="cpu").copy_GBps == 40.0
    assert local_profile(refresh=True, device="cpu").copy_GBps == 80.0
    assert local_profile(device="cpu").copy_GBps == 80.0


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("idle", "told"), [(1e6, False), (0.0, True)])
def test_a_busy_machine_is_told_and_faster_ceilings_stay(
    idle: float, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(errors, "_warned", set())
    # Whatever runs beside this test.
    monkeypatch.setattr(profiles, "idle_cpus", lambda: 1e6)
    local_ceilings(device="cpu")
    monkeypatch.setattr(profiles, "idle_cpus", lambda: idle)
    slow = [replace(one, device=measured.device_name(detect(), "cpu"), value=one.value / 2) for one in toy_ceilings()]
    monkeypatch.setattr(measured, "measure_ceilings", lambda *_, **__: slow)
    _, found = local_ceilings(refresh=True, device="cpu")
    assert ("other programs use" in capsys.readouterr().err) == told
    copy = next(one.value for one in found if one.kind == "copy")
    assert copy == (40.0 if told else 20.0)


def test_idle_cpus_are_counted_by_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 400 ticks of four CPUs 90 were idle and 10 waited for a disk."""
    texts = iter(["cpu  100 0 50 800 20 0 3 7 0 0", "cpu  350 0 90 890 30 0 5 15 0 0"])
    cpus = "".join(f"\ncpu{number} 1 1 1 1 1 1 1 1 0 0" for number in range(4))
    monkeypatch.setattr("tilewright.hardware.detect.SECONDS", 0.0)
    monkeypatch.setattr(Path, "read_text", lambda _: f"{next(texts)}{cpus}\nintr 5 cpus")
    assert profiles.idle_cpus() == 4 * 100 / 400


def test_ceilings_in_question_are_measured_again_and_the_faster_figures_kept(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_profile(device="cpu")
    scales = {"copy": 0.5, "launch": 0.5}

    def measure(device: str, *, machine: Machine) -> list[Ceiling]:
        name = measured.device_name(machine, device)
        found = [replace(one, device=name, value=one.value * scales.get(one.kind, 1.05)) for one in toy_ceilings()]
        return [one for one in found if one.kind != "cache"]

    monkeypatch.setattr(measured, "measure_ceilings", measure)
    better = remeasured_profile("cpu")
    assert better is not None and better == local_profile(device="cpu")
    assert (better.copy_GBps, better.read_GBps, better.l2_GBps) == (40.0, 31.5, 200.0)
    # A launch is a time: the shorter one is the better one.
    assert better.launch_us == 0.625
    assert remeasured_profile("cpu") is None
    assert local_profile(device="cpu") == better


def test_damaged_ceilings_are_measured_again(home: Path) -> None:
    local_profile(device="cpu")
    (kept,) = (home / "machine").iterdir()
    kept.write_text("{")
    assert local_profile(device="cpu").copy_GBps == 80.0
    assert len(json.loads(kept.read_text())["ceilings"]) == 9


def test_a_home_that_cannot_be_written_is_told_and_not_fatal(home: Path) -> None:
    (home / "machine").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match=r"cannot keep the measured ceilings in .*machine.*\.json: "):
        assert local_profile(device="cpu").copy_GBps == 40.0


def test_the_report_and_the_record_show_both_figures() -> None:
    machine = replace(MACHINE, gpus=(GPU,), driver="580", driver_cuda="13.0", cuda="13.0")
    link = Ceiling(GPU.name, "host to device", "", 12.0, "GB/s", "measured")
    ceilings = [*toy_ceilings(GPU.name), link]
    told = dict(machine_report(machine, ceilings))
    for label, text in {
        "cores": "4 (8 threads)",
        "OS": "unknown",
        "GPU memory": "11 GiB, L2 5.5 MiB",
        "driver": "580, up to CUDA 13.0",
        "copy float32": "40 GB/s measured, 6.5% of the datasheet's 616",
        # Turing has no matrix unit for bf16, so nothing is stated; and nobody states a launch.
        "matmul bfloat16": "1.5 TFLOP/s measured",
        "launch": "1.25 µs measured",
        "host to device": "12 GB/s measured, 76.2% of the datasheet's 15.75",
    }.items():
        assert told[label] == text
    assert dict(machine_report(MACHINE))["GPU"] == "none"
    record = json.loads(json.dumps(machine_record(machine, ceilings)))
    assert [gpu["name"] for gpu in record["machine"]["gpus"]] == [GPU.name]
    stated = {row["kind"]: (row["value"], row["stated"], row["of_stated"]) for row in record["ceilings"]}
    assert stated["copy"] == (40.0, 616.0, pytest.approx(40 / 616)) and stated["launch"] == (1.25, None, None)
