"""The CUDA C++ kernels (`direct.cu`, `forward.cu`, `backward.cu`, `columns.cu`): what they take, and their launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tilewright.kernels import nvrtc
from tilewright.kernels.norm.geometry import VECTOR_BYTES, Geometry, direct, geometry, period_of, programs_of

HERE = Path(__file__).parent
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""ELEMENT and WEIGHT of `stream.cuh`."""
COLUMN_WARPS = (4, 8, 16, 32)


def refusal(direction: str, matrices: Sequence[Tensor], weights: int, weight_dtype: torch.dtype) -> str | None:
    """Why the kernels cannot take these inputs [rows, columns] of one dtype, or None; `weights` as in `geometry`.

    All rows must lie alike within 16 bytes, results too, which begin at 16 bytes and are contiguous.
    """
    x = matrices[0]
    for matrix in matrices:
        odd = (matrix.stride(0) - x.shape[1]) * x.itemsize % VECTOR_BYTES if x.shape[0] > 1 else 0
        if matrix.data_ptr() % VECTOR_BYTES or odd:
            return "rows do not lie within 16 bytes as the result's do"
    return unfit(x.device.index, direction, x.shape[1], x.dtype, len(matrices), weights, weight_dtype)


def unfit(
    device: int, direction: str, columns: int, dtype: torch.dtype, inputs: int, weights: int, weight_dtype: torch.dtype
) -> str | None:
    """Why the kernels cannot take rows of that length on that device, or None."""
    if dtype not in CODES:
        return f"{dtype} has no CUDA C++ kernel"
    if not nvrtc.available(device):
        return "needs the package cuda-bindings and a device with clusters"
    period = period_of(columns * dtype.itemsize)
    if geometry(direction, columns, dtype.itemsize, period, inputs, weights, weight_dtype.itemsize) is None:
        return f"no cluster holds rows of {columns} columns"
    return None


class _Launch:
    """One build on one device: the kernel and how many of its programs run at once."""

    def __init__(self, source: str, device: int, geometry: Geometry, period: int, flags: dict[str, int]) -> None:
        self.geometry = geometry
        self.period = period
        self.kernel = nvrtc.kernel(
            HERE / f"{source}.cu",
            f"norm_{source}",
            "PqPqPqPqPPPPqi" if source == "backward" else "PqPqPPqPPPPqif",
            device=device,
            threads=geometry.threads,
            shared_bytes=geometry.shared_bytes,
            cluster=geometry.cluster,
            definitions=(*geometry.definitions(), *flags.items()),
        )
        self.resident = None if source == "direct" else _resident(self.kernel, device, geometry.cluster)

    def programs(self, rows: int) -> int:
        """Programs to launch: one for every tile, or as many as stay on the device."""
        tiles = -(-rows // self.geometry.groups)
        if self.resident is None:
            return tiles
        return programs_of(self.resident, tiles, self.geometry.groups, self.period)


@functools.cache
def _launch(
    direction: str,
    device: int,
    columns: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    has_weight: bool,
    has_bias: bool,
    centered: bool,
    residual: bool,
) -> _Launch:
    period = period_of(columns * dtype.itemsize)
    weights = has_weight + (has_bias and direction == "forward")
    inputs = (1 if direction == "forward" else 2) + residual
    one_block = direct(columns, dtype.itemsize, period, centered) if direction == "forward" else None
    chosen = one_block or geometry(direction, columns, dtype.itemsize, period, inputs, weights, weight_dtype.itemsize)
    assert chosen is not None, "unfit() answers for every direction"
    flags = {
        "ELEMENT": CODES[dtype],
        "WEIGHT": CODES[weight_dtype],
        "HAS_WEIGHT": int(has_weight),
        "HAS_BIAS": int(has_bias),
        "CENTERED": int(centered),
        "RESIDUAL": int(residual),
        "RAGGED": int(period > 1),
    }
    return _Launch("direct" if one_block else direction, device, chosen, period, flags)


def _resident(kernel: nvrtc.Kernel, device: int, cluster: int) -> int:
    """Programs that the whole device holds at once; clusters do not cross the groups its multiprocessors form."""
    if cluster == 1:
        return kernel.blocks_per_multiprocessor() * torch.cuda.get_device_properties(device).multi_processor_count
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
    config.sharedMemBytes = kernel.shared_bytes
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
    config.attrs, config.numAttrs = [attribute], 1
    status, clusters = driver.cuOccupancyMaxActiveClusters(kernel.function, config)
    if status.value != 0:
        raise RuntimeError(f"CUDA answered {status.name} for clusters of {cluster}")
    return int(clusters)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _pitch(matrix: Tensor | None) -> int:
    """Bytes from row to row."""
    return 0 if matrix is None else (matrix.stride(0) if matrix.shape[0] > 1 else matrix.shape[1]) * matrix.itemsize


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """y, x + residual (None without one), mean (empty unless `centered`) and rstd, of matrices [rows, columns]."""
    rows, columns = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(y)
    mean = torch.empty(rows if centered else 0, dtype=torch.float32, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    dtype = x.dtype if weight is None else weight.dtype
    launch = _launch(
        "forward", x.device.index, columns, x.dtype, dtype, weight is not None, bias is not None, centered,
        residual is not None,
    )  # fmt: skip
    launch.kernel(
        (launch.programs(rows) * launch.geometry.cluster,),
        x.data_ptr(), _pitch(x), _pointer(residual), _pitch(residual), y.data_ptr(), _pointer(total), _pitch(y),
        _pointer(weight), _pointer(bias), mean.data_ptr(), rstd.data_ptr(), rows, columns, eps,
    )  # fmt: skip
    return y, total, mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    dsum: Tensor | None,
    weight: Tensor | None,
    has_bias: bool,
    mean: Tensor,
    rstd: Tensor,
    centered: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx (plus `dsum`), dweight and dbias, of matrices [rows, columns]."""
    rows, columns = x.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dtype = x.dtype if weight is None else weight.dtype
    launch = _launch(
        "backward", x.device.index, columns, x.dtype, dtype, weight is not None, has_bias, centered, dsum is not None
    )
    programs, sums = launch.programs(rows), (weight is not None) + has_bias
    partial = torch.empty((sums, programs, columns), dtype=torch.float32, device=x.device)
    launch.kernel(
        (programs * launch.geometry.cluster,),
        x.data_ptr(), _pitch(x), dy.data_ptr(), _pitch(dy), _pointer(dsum), _pitch(dsum), dx.data_ptr(), _pitch(dx),
        _pointer(weight), mean.data_ptr(), rstd.data_ptr(), partial.data_ptr(), rows, columns,
    )  # fmt: skip
    gradients = [torch.empty(columns, dtype=dtype, device=x.device) for _ in range(sums)]
    if sums:
        _columns(x.device.index, CODES[dtype], programs)(
            (-(-columns // 32), sums), partial.data_ptr(), gradients[0].data_ptr(), gradients[-1].data_ptr(), programs,
            columns,
        )  # fmt: skip
    return dx, gradients[0] if weight is not None else None, gradients[-1] if has_bias else None


@functools.cache
def _columns(device: int, weight: int, programs: int) -> nvrtc.Kernel:
    """The sum over `programs`: more warps share a column where there are more to add, about eight each."""
    warps = next((warps for warps in COLUMN_WARPS if warps * 8 >= programs), COLUMN_WARPS[-1])
    return nvrtc.kernel(
        HERE / "columns.cu",
        "norm_columns",
        "PPPii",
        device=device,
        threads=warps * 32,
        definitions=(("WEIGHT", weight), ("THREADS", warps * 32)),
    )
