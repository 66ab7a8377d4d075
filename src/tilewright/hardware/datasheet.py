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
    shared_GBps: float | None = None
    """Shared memory of all multiprocessors at the clock that `vector_TFLOPs` states."""


DATASHEETS = {
    # NVIDIA H200 datasheet (SXM; figures with sparsity halved). Shared memory: 132 SMs × 128 bytes × 1.98 GHz.
    "NVIDIA H200": Datasheet(
        dram_GBps=4800.0,
        matmul_TFLOPs={"bfloat16": 989.5, "float16": 989.5, "tf32": 494.5, "float32": 67.0, "float64": 67.0},
        vector_TFLOPs=67.0,
        shared_GBps=33454.0,
    ),
    # NVIDIA H100 datasheet (SXM; figures with sparsity halved). Shared memory as of the H200.
    "NVIDIA H100 80GB HBM3": Datasheet(
        dram_GBps=3350.0,
        matmul_TFLOPs={"bfloat16": 989.5, "float16": 989.5, "tf32": 494.5, "float32": 67.0, "float64": 67.0},
        vector_TFLOPs=67.0,
        shared_GBps=33454.0,
    ),
    # NVIDIA HGX B200 datasheet, an eighth (figures with sparsity halved). Shared memory: 148 × 128 bytes × 1.98 GHz.
    "NVIDIA B200": Datasheet(
        dram_GBps=8000.0,
        matmul_TFLOPs={"bfloat16": 2250.0, "float16": 2250.0, "tf32": 1125.0, "float32": 75.0, "float64": 37.0},
        vector_TFLOPs=75.0,
        shared_GBps=37509.0,
    ),
    # NVIDIA A100 datasheet, 80GB SXM. Shared memory: 108 SMs × 128 bytes × 1.41 GHz.
    "NVIDIA A100-SXM4-80GB": Datasheet(
        dram_GBps=2039.0,
        matmul_TFLOPs={"bfloat16": 312.0, "float16": 312.0, "tf32": 156.0, "float32": 19.5, "float64": 19.5},
        vector_TFLOPs=19.5,
        shared_GBps=19492.0,
    ),
    # "NVIDIA Ada GPU Architecture", table of the GeForce RTX 4090. Shared memory: 128 SMs × 128 bytes × 2.52 GHz.
    "NVIDIA GeForce RTX 4090": Datasheet(
        dram_GBps=1008.0,
        matmul_TFLOPs={"bfloat16": 165.2, "float16": 165.2, "tf32": 82.6, "float32": 82.6, "float64": 1.29},
        vector_TFLOPs=82.6,
        shared_GBps=41288.0,
    ),
    # NVIDIA L40S datasheet (figures with sparsity halved). Shared memory: 142 SMs × 128 bytes × 2.52 GHz.
    "NVIDIA L40S": Datasheet(
        dram_GBps=864.0,
        matmul_TFLOPs={"bfloat16": 362.0, "float16": 362.0, "tf32": 183.0, "float32": 91.6, "float64": 1.43},
        vector_TFLOPs=91.6,
        shared_GBps=45804.0,
    ),
    # "NVIDIA RTX Blackwell GPU Architecture", table of the GeForce RTX 5090. Shared memory: 170 SMs × 128 bytes × 2.407
    # GHz.
    "NVIDIA GeForce RTX 5090": Datasheet(
        dram_GBps=1792.0,
        matmul_TFLOPs={"bfloat16": 209.5, "float16": 209.5, "tf32": 104.8, "float32": 104.8, "float64": 1.64},
        vector_TFLOPs=104.8,
        shared_GBps=52376.0,
    ),
    # AMD Instinct MI300X datasheet. Shared memory: 304 CUs × 128 bytes × 2.1 GHz.
    "AMD Instinct MI300X": Datasheet(
        dram_GBps=5325.0,
        matmul_TFLOPs={"bfloat16": 1307.4, "float16": 1307.4, "tf32": 653.7, "float32": 163.4, "float64": 163.4},
        vector_TFLOPs=163.4,
        shared_GBps=81715.0,
    ),
    # AMD Instinct MI250 datasheet, half: PyTorch has a device for each of its two dies. 104 CUs × 128 bytes × 1.7 GHz.
    "AMD Instinct MI250": Datasheet(
        dram_GBps=1638.4,
        matmul_TFLOPs={"bfloat16": 181.0, "float16": 181.0, "float32": 45.3, "float64": 45.3},
        vector_TFLOPs=22.6,
        shared_GBps=22630.0,
    ),
    # AMD Instinct MI355X datasheet.
    "AMD Instinct MI355X": Datasheet(
        dram_GBps=8000.0,
        matmul_TFLOPs={"bfloat16": 2516.6, "float16": 2516.6, "float32": 157.3, "float64": 78.6},
        vector_TFLOPs=157.3,
    ),
    # "NVIDIA Turing GPU Architecture", table of the GeForce RTX 2080 Ti at reference clocks.
    "NVIDIA GeForce RTX 2080 Ti": Datasheet(
        dram_GBps=616.0, matmul_TFLOPs={"float16": 53.8, "float32": 13.4, "float64": 0.42}, vector_TFLOPs=13.4
    ),
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
