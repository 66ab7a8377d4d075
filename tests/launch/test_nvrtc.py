"""CUDA C++ at run time: what is compiled, what is kept, and how a launch hands over its arguments."""

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.launch.driver import CONTEXT, REFUSED, FakeDriver
from tilewright.hardware.architectures import stated_limits
from tilewright.launch import nvrtc
from tilewright.records import cache
from tilewright.records.errors import CompilerError

SOURCE = '#include "row.cuh"\nextern "C" __global__ void one(float *x) { *x = NUMBER; }\n'


@pytest.fixture
def compiler() -> None:
    try:
        nvrtc.version()
    except CompilerError as error:
        pytest.skip(str(error).splitlines()[0])


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "one.cu"
    path.write_text(SOURCE)
    return path


def test_headers_of_the_folder_come_before_those_of_the_room(tmp_path: Path) -> None:
    assert nvrtc._headers(SOURCE, tmp_path) == {"row.cuh": (nvrtc.HEADERS / "row.cuh").read_text()}
    (tmp_path / "row.cuh").write_text('#include "own.cuh"\n')
    (tmp_path / "own.cuh").write_text('#include "row.cuh"\n')
    assert list(nvrtc._headers(SOURCE, tmp_path)) == ["own.cuh", "row.cuh"]
    with pytest.raises(CompilerError, match=r"no header lost\.cuh in "):
        nvrtc._headers('#include "lost.cuh"\n', tmp_path)


@pytest.mark.usefixtures("compiler")
def test_machine_code_is_kept_and_a_damaged_entry_made_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = nvrtc.cubin(source, "sm_90", (("NUMBER", 3),))
    assert code.startswith(b"\x7fELF")
    (kept,) = cache.cache_dir().glob("*/*.cubin")
    compile_again, compiled = nvrtc._compile, []
    monkeypatch.setattr(nvrtc, "_compile", lambda *parts: compiled.append(parts) or compile_again(*parts))
    assert nvrtc.cubin(source, "sm_90", (("NUMBER", 3),)) == code
    assert compiled == []
    kept.write_bytes(kept.read_bytes()[:100])
    assert nvrtc.cubin(source, "sm_90", (("NUMBER", 3),)) == code
    assert nvrtc.cubin(source, "sm_90", (("NUMBER", 4),)) != code
    assert len(compiled) == 2


@pytest.mark.usefixtures("compiler")
def test_what_the_compiler_says_is_passed_on(source: Path) -> None:
    with pytest.raises(CompilerError, match=r'one\.cu\(2\): error: identifier "NUMBER" is undefined'):
        nvrtc.cubin(source, "sm_90")


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(nvrtc.importlib, "import_module", missing)
    with pytest.raises(CompilerError, match="pip install cuda-bindings"):
        nvrtc._bindings("driver")


def test_a_launch(fake: FakeDriver) -> None:
    seen: list[tuple[Any, ...]] = []
    kinds = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float, ctypes.c_int64

    def look(*places: int) -> None:
        seen.append(tuple(kind.from_address(place).value for kind, place in zip(kinds, places, strict=True)))

    number = fake.kernel("one", "Pifq", look).function
    launch = nvrtc.Kernel("one", number, "Pifq", device=1, threads=256, shared_bytes=4096, cluster=1)
    launch((5,), 2**40, -3, 0.5, 2**33)
    assert fake.launches == [("one", (5, 1, 1), 256, 4096)] and seen == [(2**40, -3, 0.5, 2**33)]
    launch((0, 7), 2**40, -3, 0.5, 2**33)
    assert len(fake.launches) == 1 and fake.contexts == [CONTEXT]


def test_a_refused_launch_says_what_was_asked(fake: FakeDriver) -> None:
    fake.refusals = [REFUSED]
    launch = nvrtc.Kernel("one", 1, "Pifq", device=0, threads=1024, shared_bytes=0, cluster=1)
    with pytest.raises(CompilerError, match=r"one: .* CUDA error 700 \(\(2, 3, 1\) blocks of 1024 threads"):
        launch((2, 3), 0, 0, 0.0, 0)


def test_available_only_with_the_package_and_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, capability, expected in ((object(), "9.0", True), (None, "9.0", False), (object(), "8.9", False)):
        nvrtc.bindings_installed.cache_clear()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
        limits = stated_limits(capability, multiprocessors=132, l2_bytes=2**20)
        monkeypatch.setattr(nvrtc, "_limits", lambda device, limits=limits: limits)
        assert nvrtc.available(0) is expected
    nvrtc.bindings_installed.cache_clear()
