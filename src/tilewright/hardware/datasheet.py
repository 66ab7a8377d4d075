"""Datasheet figures of a device, by the name that its driver gives, shown beside measured ceilings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.records.measurement import Ceiling

if TYPE_CHECKING:
    from tilewright.hardware.detect import Gpu

_PCIE_LANE_GBps = {3: 8 * 128 / 130 / 8, 4: 16 * 128 / 130 / 8, 5: 32 * 128 / 130 / 8}
"""One lane in one direction: transfers a second, less the 128b/130b code (PCI Express Base Specification)."""


@dataclass(frozen=True)
class Datasheet:
    """Peak rates, dense; GB/s are 10⁹ bytes."""

    dram_GBps: float
    matmul_TFLOPs: Mapping[str, float]
    """By dtype as in measured ceilings; fp16 and bf16 with fp32 accumulation."""
    vector_TFLOPs: float
    """fp32 multiply-adds outside matrix units."""
    sms: int
    """Multiprocessors, or AMD's compute units."""
    clock_GHz: float | None
    """That `vector_TFLOPs` states; None where it is not said."""

    @property
    def shared_GBps(self) -> float | None:
        """Shared memory of all multiprocessors: 128 bytes a cycle each."""
        return None if self.clock_GHz is None else round(self.sms * 128 * self.clock_GHz)


def _sheet(
    dram: float, vector: float, sms: int, clock_GHz: float | None = None, *, narrow: float, **others: float
) -> Datasheet:
    """`narrow`: products of bf16 and fp16; `others`: by dtype, fp32 at the rate of `vector` unless it is given."""
    rates = {"bfloat16": narrow, "float16": narrow, "float32": vector, **others}
    return Datasheet(dram, {dtype: rate for dtype, rate in rates.items() if rate}, vector, sms, clock_GHz)


# NVIDIA's figures with sparsity are halved.
DATASHEETS = {
    # NVIDIA H200, H100 and A100 datasheets: SXM.
    "NVIDIA H200": _sheet(4800.0, 67.0, 132, 1.98, narrow=989.5, tf32=494.5, float64=67.0),
    "NVIDIA H100 80GB HBM3": _sheet(3350.0, 67.0, 132, 1.98, narrow=989.5, tf32=494.5, float64=67.0),
    "NVIDIA A100-SXM4-80GB": _sheet(2039.0, 19.5, 108, 1.41, narrow=312.0, tf32=156.0, float64=19.5),
    # NVIDIA HGX B200 datasheet, an eighth. Its copies disagree on the memory: 7.7 TB/s a GPU in some, 8 TB/s in others;
    # here 8, as DGX B200's datasheet has it (64 TB/s of eight).
    "NVIDIA B200": _sheet(8000.0, 75.0, 148, 1.98, narrow=2250.0, tf32=1125.0, float64=37.0),
    # "NVIDIA Ada GPU Architecture", table of the GeForce RTX 4090; NVIDIA L40S datasheet.
    "NVIDIA GeForce RTX 4090": _sheet(1008.0, 82.6, 128, 2.52, narrow=165.2, tf32=82.6, float64=1.29),
    "NVIDIA L40S": _sheet(864.0, 91.6, 142, 2.52, narrow=362.0, tf32=183.0, float64=1.43),
    # "NVIDIA RTX Blackwell GPU Architecture", table of the GeForce RTX 5090.
    "NVIDIA GeForce RTX 5090": _sheet(1792.0, 104.8, 170, 2.407, narrow=209.5, tf32=104.8, float64=1.64),
    # AMD Instinct datasheets. MI250: half, since PyTorch has a device for each of its two dies.
    "AMD Instinct MI300X": _sheet(5325.0, 163.4, 304, 2.1, narrow=1307.4, tf32=653.7, float64=163.4),
    "AMD Instinct MI250": _sheet(1638.4, 22.6, 104, 1.7, narrow=181.0, float32=45.3, float64=45.3),
    "AMD Instinct MI355X": _sheet(8000.0, 157.3, 256, narrow=2516.6, float64=78.6),
    # "NVIDIA Turing GPU Architecture", table of the GeForce RTX 2080 Ti at reference clocks.
    "NVIDIA GeForce RTX 2080 Ti": _sheet(616.0, 13.4, 68, narrow=53.8, bfloat16=0.0, float64=0.42),
}


def datasheet_of(device_name: str) -> Datasheet | None:
    """The datasheet of exactly the device that a driver calls `device_name`; None if it is not known.

    >>> datasheet_of("NVIDIA H200").dram_GBps
    4800.0
    >>> datasheet_of("NVIDIA GeForce RTX 4090 D") is None
    True
    """
    return DATASHEETS.get(device_name)


def stated(ceiling: Ceiling, datasheet: Datasheet | None, gpu: Gpu | None) -> float | None:
    """The datasheet figure for what `ceiling` measured, in its unit; None if no datasheet states it."""
    if ceiling.kind in ("host to device", "device to host"):
        return pcie_GBps(gpu.pcie) if gpu and gpu.pcie else None
    if datasheet is None:
        return None
    if ceiling.kind.split()[0] == "matmul":
        return datasheet.matmul_TFLOPs.get(ceiling.dtype)
    if ceiling.kind in ("copy", "read", "write"):
        return datasheet.dram_GBps
    return {"vector": datasheet.vector_TFLOPs, "shared": datasheet.shared_GBps}.get(ceiling.kind)


def pcie_GBps(link: str) -> float | None:
    """Rate in one direction, packet headers included; None for an unknown generation.

    >>> round(pcie_GBps("PCIe 5 x16"), 1)
    63.0
    """
    match = re.fullmatch(r"PCIe (\d+) x(\d+)", link)
    lane = _PCIE_LANE_GBps.get(int(match[1])) if match else None
    return None if match is None or lane is None else lane * int(match[2])
