"""Kernels of compiled programs are timed, their times fitted, kept, and followed by the next profile."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.hardware.test_profiles import toy_ceilings
from tilewright.cost.work import Work
from tilewright.hardware import ceilings
from tilewright.hardware.profiles import local_profile
from tilewright.measure.timing.device_records import Record, busy_us, divided
from tilewright.verbs import calibration_programs
from tilewright.verbs.calibration import Program, calibrate, timed_kernels


def several(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.linear(torch.softmax(x, -1), w))


PROGRAM = Program("several", several, [(32, 64), (48, 64)])


def test_each_launch_of_a_program_is_timed_with_its_work() -> None:
    found: dict[str, list[Work]] = {"forward": [], "backward": []}
    for one in timed_kernels("cpu", [PROGRAM]):
        found[one.name.split()[1]].append(one.work)
        assert one.measured_us > 0
    forward, backward = found["forward"], found["backward"]
    assert [work.kind for work in forward] == ["rows, three passes, short", "product", "pointwise"]
    (product,) = [work for work in forward if work.kind == "product"]
    assert product.products == ((1, 32, 48, 64),) and product.flops == 2 * 32 * 48 * 64
    assert [work.kind for work in backward].count("product") == 2


def test_a_calibration_is_kept_and_followed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sized = [Program("gelu", F.gelu, [(n, 64)], training=False) for n in (16, 64, 256, 1024)]
    monkeypatch.setattr(calibration_programs, "programs", lambda device: {"gelu": sized})
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda *_, **__: toy_ceilings())
    assert local_profile(device="cpu").kernel_times == {}
    fitted = calibrate("cpu")
    assert list(fitted) == ["pointwise"] and fitted["pointwise"][0] == 4
    profile = local_profile(device="cpu")
    assert list(profile.kernel_times) == ["pointwise"]
    kept = next(home.rglob("*kernels.json"))
    kept.write_text(kept.read_text()[:-20])
    assert ceilings.kept_kernel_times(profile.name) == {}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_programs_of_a_calibration_are_of_every_kind(device: str) -> None:
    groups = calibration_programs.programs(device)
    assert {"products", "layer_norm", "attention", "own_norms"} <= set(groups)
    assert all(program.shapes for several in groups.values() for program in several)


def test_records_are_divided_by_the_marks_between_calls() -> None:
    def record(name: str, start: int, end: int) -> Record:
        return Record(name, start, end)

    mark = "spin_kernel(long)"
    records = [
        record(mark, 0, 10), record("a", 12, 20), record("b", 20, 31), record(mark, 40, 50), record(mark, 60, 70),
        record("c", 71, 79),
    ]  # fmt: skip
    parts = divided(list(reversed(records)))
    assert [[one.name for one in part] for part in parts] == [["a", "b"], [], ["c"]]
    assert busy_us(parts[0]) == pytest.approx(0.019)
