"""`tilewright kernel` and `tilewright doctor` through the command line."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import Tilewright, between, documented_keys
from tilewright.hardware import profiles
from tilewright.hardware.detect import Cpu, Gpu, Machine
from tilewright.records.measurement import Ceiling

KERNELS = str(Path(__file__).parents[1] / "anatomy" / "kernels.py")


def test_the_reference_case_is_drawn(tilewright: Tilewright) -> None:
    ended = tilewright("kernel", f"{KERNELS}:weighted", "--on", "h200")
    assert (ended.code, ended.err) == (0, "")
    assert "63 programs, grid (63) = ⌈1,000 / ROWS 16⌉, 128 threads each" in ended.lines
    assert between(ended.lines, "programs")[1:] == [
        "each walks 8 tiles; program 0",
        "  reads x[0–15, 0–511] in 8 tiles of 16×64",
        "  reads w[0–511] in 8 tiles of 64",
        "  writes out[0–15] in 1 tile of 16",
    ]
    drawn = [line.split() for line in between(ended.lines, "x[1000, 512]: ")[2:]]
    steps = list("12345678")
    assert drawn == [
        ["0–15", "0", *steps],
        ["16–31", "1", *steps],
        ["⋮", "⋮"],
        ["976–991", "61", *steps],
        ["992–999", "62", *steps],
    ]
    assert "69 multiprocessors get no program" in ended.lines
    table = [line.split() for line in between(ended.lines, "other tile sizes")[2:]]
    assert [row[:4] for row in table][:2] == [["as", "launched", "63", "8"], ["ROWS", "32", "32", "8"]]
    assert "global loads: 3 of 16 B" in ended.lines


def test_one_text_alone_is_printed_and_json_has_the_whole_view(tilewright: Tilewright) -> None:
    for text, told in (("--source", "def weighted("), ("--ptx", ".target sm_80"), ("--sass", "LDG.E.128")):
        ended = tilewright("kernel", f"{KERNELS}:weighted", "--on", "a100", text)
        assert ended.code == 0 and told in ended.out and "occupancy" not in ended.out
    ended = tilewright("kernel", f"{KERNELS}:weighted", "--on", "a100", "--json")
    document = json.loads(ended.out)
    ((kernel,),) = [subject["kernels"] for subject in document]
    assert document[0].keys() == documented_keys("kernel")
    assert kernel.keys() == documented_keys("a row of `kernels`")
    assert kernel["launch"]["grid"] == [63, 1, 1] and kernel["launch"]["ptx"] and kernel["launch"]["sass"]
    assert (kernel["waves"]["sms"], kernel["waves"]["programs"]) == (108, 63) and kernel["occupancy"]["limited_by"]


def test_failures_have_a_message_and_a_code(tilewright: Tilewright) -> None:
    for arguments, code, told in (
        ((f"{KERNELS}:wieghted",), 3, "did you mean weighted?"),
        ((f"{KERNELS}:weighted", "--json", "--sass"), 2, "--json and --page have the texts already"),
        ((f"{KERNELS}:weighted", "--launch", "launch_nothing", "--on", "h200"), 1, "launches no Triton or CUDA C++"),
    ):
        ended = tilewright("kernel", *arguments)
        assert ended.code == code and told in ended.err and ended.out == ""


def test_doctor_shows_and_writes_the_machine(
    tilewright: Tilewright, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = Gpu("NVIDIA H200", "9.0", 2**37, 60 * 2**20, 132, 2048, 65536, 233472, "PCIe 5 x16")
    machine = Machine(Cpu("Toy CPU"), (gpu,), 2**37, "580", "13.0", "13.0", "Linux", "6.1", "3.12", "2.11", "3.6")
    copy = Ceiling(gpu.name, "copy", "float32", 4272.0, "GB/s", "measured")
    asked: list[tuple[bool, str | None]] = []

    def local_ceilings(refresh: bool, device: str | None) -> tuple[Machine, list[Ceiling]]:
        asked.append((refresh, device))
        return machine, [copy]

    monkeypatch.setattr(profiles, "local_ceilings", local_ceilings)
    out = tmp_path / "doctor.json"
    ended = tilewright("doctor", "--refresh", "--device", "cuda", "--out", str(out))
    assert (ended.code, asked) == (0, [(True, "cuda")])
    told = {line[:18].strip(): line[18:] for line in ended.lines}
    assert told["GPU"] == "NVIDIA H200" and told["PyTorch"] == "2.11 (CUDA 13.0)"
    assert "copy float32      4,272 GB/s measured, 89.0% of the datasheet's 4,800" in ended.lines
    written = json.loads(out.read_text())
    assert written["ceilings"][0]["of_stated"] == pytest.approx(0.89)
    assert json.loads(tilewright("doctor", "--json").out) == written and written.keys() == documented_keys("doctor")
