"""When the C++ executor is built: before a program on a GPU runs, beside the first calls on a CPU."""

from types import SimpleNamespace

import pytest

from tilewright import backend
from tilewright.hardware.profiles import local_profile, profile_for
from tilewright.hardware.target import Target

GPU = profile_for("h200")


@pytest.mark.parametrize(
    ("target", "did"),
    [
        (Target(GPU), ["begin", "wait"]),
        (Target(GPU, is_present=False), []),
        (Target(local_profile(device="cpu")), []),
    ],
    ids=["on a GPU", "planned for a GPU", "on a CPU"],
)
def test_compilation_for_a_gpu_waits_for_the_executor(
    target: Target, did: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    build = SimpleNamespace(module=lambda: done.append("begin"), wait=lambda: done.append("wait"))
    monkeypatch.setattr(backend, "EXTENSION", build)
    backend._await_executor(target)
    assert done == did
