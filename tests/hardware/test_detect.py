"""A made-up machine whose every figure is known, and this one where the kernel tells the same twice."""

import os
import platform
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tilewright.hardware import detect as room
from tilewright.hardware.detect import Cpu, Gpu, detect, read_cpu, read_ram_bytes

CPUINFO = """\
processor\t: 0
model name\t: AMD EPYC 9654 96-Core Processor
flags\t\t: fpu sse4_2 avx fma avx2 avx512f avx512_bf16 rdpid

processor\t: 1
model name\t: AMD EPYC 9654 96-Core Processor
flags\t\t: fpu sse4_2 avx fma avx2 avx512f avx512_bf16 rdpid
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def machine(root: Path) -> Path:
    """Two sockets of one core of two threads; an L3 for each socket."""
    write(root / "proc/cpuinfo", CPUINFO)
    write(root / "proc/meminfo", "MemTotal:       24684100 kB\nMemFree:  1 kB\n")
    for thread in range(4):
        folder = root / f"sys/devices/system/cpu/cpu{thread}"
        socket = thread // 2
        write(folder / "topology/physical_package_id", f"{socket}\n")
        write(folder / "topology/core_id", "0\n")
        shared = f"{2 * socket}-{2 * socket + 1}"
        for index, cache in enumerate(["1 Data 48K", "1 Instruction 64K", "2 Unified 1024K", "3 Unified 32M"]):
            level, kind, size = cache.split()
            for name, text in {"level": level, "type": kind, "size": size, "shared_cpu_list": shared}.items():
                write(folder / f"cache/index{index}/{name}", text + "\n")
    write(root / "sys/devices/system/cpu/cpufreq/boost", "1\n")
    return root


def test_every_figure_of_a_known_machine(tmp_path: Path) -> None:
    assert read_cpu(machine(tmp_path)) == Cpu(
        model="AMD EPYC 9654 96-Core Processor",
        cores=2,
        threads=4,
        isa=("sse4.2", "avx", "fma", "avx2", "avx512", "avx512_bf16"),
        l1_bytes=48 * 1024,
        l2_bytes=1024**2,
        l3_bytes=64 * 1024**2,
    )
    assert read_ram_bytes(tmp_path) == 24684100 * 1024


def test_arm_lists_its_features(tmp_path: Path) -> None:
    write(tmp_path / "proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd sve bf16\n")
    cpu = read_cpu(tmp_path)
    assert (cpu.model, cpu.isa) == (None, ("neon", "sve", "bf16"))


def test_what_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert read_cpu(tmp_path) == Cpu()
    assert read_ram_bytes(tmp_path) is None
    write(tmp_path / "sys/devices/system/cpu/cpu0/cache/index0/size", "garbled\n")
    assert read_cpu(tmp_path).l1_bytes is None


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [
        (Cpu(cores=4, l2_bytes=100, l3_bytes=900), 900),
        (Cpu(cores=4, l2_bytes=100), 400),
        (Cpu(l2_bytes=100), None),
        (Cpu(), None),
    ],
)
def test_the_last_level_before_memory(cpu: Cpu, expected: int | None) -> None:
    assert cpu.last_level_bytes == expected


def test_this_machine_agrees_with_the_operating_system() -> None:
    here = detect()
    assert here.ram_bytes is not None
    assert 0 < here.ram_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert here.cpu.threads == len(os.sched_getaffinity(0))
    assert here.kernel == platform.release()
    # PyPI's wheels have no local version (+cu130) in their metadata.
    assert here.torch in (torch.__version__, torch.__version__.split("+")[0])
    assert here.cuda == torch.version.cuda
    assert len(here.gpus) >= torch.cuda.device_count()


CARD = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    total_memory=150 * 10**9,
    L2_cache_size=60 * 1024**2,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_multiprocessor=228 * 1024,
    shared_memory_per_block_optin=227 * 1024,
    max_threads_per_block=1024,
    warp_size=32,
    uuid="1234",
)
ANSWERS = {
    "SystemGetCudaDriverVersion": 13010,
    "SystemGetDriverVersion": "580.65.06",
    "DeviceGetCount": 1,
    "DeviceGetHandleByIndex": "handle",
    "DeviceGetHandleByUUID": "handle",
    "DeviceGetUUID": "GPU-1234",
    "DeviceGetName": "NVIDIA H200",
    "DeviceGetCudaComputeCapability": (9, 0),
    "DeviceGetMemoryInfo": SimpleNamespace(total=141 * 10**9),
    "DeviceGetMaxPcieLinkGeneration": 5,
    "DeviceGetMaxPcieLinkWidth": 16,
}


def with_modules(
    monkeypatch: pytest.MonkeyPatch, torch_sees: object = None, driver: Mapping[str, object] | None = None
) -> None:
    """A PyTorch and a driver that know one card; either is missing, or fails, if an exception is what it knows."""
    modules = {}
    if torch_sees is not None:
        cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 1)
        cuda.get_device_properties = lambda _: answer(torch_sees)
        modules["torch"] = SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="13.0"))
    if driver is not None:
        questions = {f"nvml{name}": partial(answer, value) for name, value in driver.items()}
        modules["pynvml"] = SimpleNamespace(
            NVMLError=NVMLError, nvmlInit=lambda: None, nvmlShutdown=lambda: None, **questions
        )
    monkeypatch.setattr(room, "_module", modules.get)


class NVMLError(Exception):
    pass


def answer(value: object, *_: object) -> object:
    if isinstance(value, Exception):
        raise value
    return value


BROKEN = dict.fromkeys(ANSWERS, NVMLError("driver/library version mismatch"))


def test_a_card_seen_by_pytorch_and_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    with_modules(monkeypatch, CARD, ANSWERS)
    here = detect()
    assert here.gpus == (
        Gpu(
            name=CARD.name,
            capability="9.0",
            memory_bytes=CARD.total_memory,
            l2_bytes=CARD.L2_cache_size,
            sms=CARD.multi_processor_count,
            max_threads_per_sm=CARD.max_threads_per_multi_processor,
            registers_per_sm=CARD.regs_per_multiprocessor,
            shared_bytes_per_sm=CARD.shared_memory_per_multiprocessor,
            pcie="PCIe 5 x16",
            uuid="GPU-1234",
        ),
    )
    assert (here.driver, here.driver_cuda, here.cuda) == ("580.65.06", "13.1", "13.0")


def test_a_card_only_the_driver_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    with_modules(monkeypatch, None, ANSWERS)
    here = detect()
    assert here.gpus == (Gpu("NVIDIA H200", "9.0", memory_bytes=141 * 10**9, pcie="PCIe 5 x16", uuid="GPU-1234"),)
    assert here.cuda is None


def test_a_driver_that_fails_hides_only_what_it_alone_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    with_modules(monkeypatch, CARD, BROKEN)
    here = detect()
    assert here.gpus[0].sms == 132 and here.gpus[0].pcie is None
    assert (here.driver, here.driver_cuda) == (None, None)
    with_modules(monkeypatch, RuntimeError("CUDA unknown error"), BROKEN)
    assert detect().gpus == ()
    with_modules(monkeypatch)
    assert detect().gpus == ()
