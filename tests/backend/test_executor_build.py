"""What runs until the C++ executor is built: eager's graph on a GPU, the compiled program elsewhere."""

from types import SimpleNamespace
from typing import Any

import pytest

from tilewright import backend
from tilewright.hardware.profiles import local_profile, profile_for
from tilewright.hardware.target import Target

GPU = profile_for("h200")


def built_later(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An executor whose build ends when somebody waits for it, or when `is_building` is set."""
    build = SimpleNamespace(module=lambda: None, is_building=True)
    build.wait = lambda: setattr(build, "is_building", False)
    monkeypatch.setattr(backend, "EXTENSION", build)
    return build


def test_eagers_graph_runs_on_a_gpu_until_the_executor_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWRIGHT_STRICT", raising=False)
    build = built_later(monkeypatch)
    call = backend._once_built(lambda x: f"compiled {x}", lambda: lambda x: f"eager {x}", Target(GPU))  # type: ignore[arg-type, return-value]
    assert call(1) == "eager 1"
    build.is_building = False
    assert call(2) == "compiled 2"


def test_the_strict_mode_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_STRICT", "1")
    built_later(monkeypatch)
    assert backend._once_built(str, lambda: pytest.fail("eager"), Target(GPU)) is str


@pytest.mark.parametrize("target", [Target(GPU, is_present=False), Target(local_profile(device="cpu"))])
def test_other_devices_run_the_program_at_once(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    built_later(monkeypatch)
    assert backend._once_built(str, lambda: pytest.fail("eager"), target) is str
