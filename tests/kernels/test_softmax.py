"""Softmax and log-softmax on the CPU: the operator's contract with PyTorch, its formula, and its machine code."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import machine_code
from tests.kernels.devices import H200, limits
from tests.kernels.nvcc import spilled
from tests.kernels.rows import SPECIALS, layout
from tests.proving import prove
from tilewright.bench.suites.softmax import SUITES
from tilewright.kernels.row import ELEMENTS, RowLayout
from tilewright.kernels.row_schedule import Schedule
from tilewright.kernels.softmax import by_impl, cuda, log_softmax, softmax
from tilewright.kernels.softmax import triton as kernels
from tilewright.launch.nvrtc import Definitions

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FUNCTIONS = {"softmax": (softmax, torch.softmax), "log_softmax": (log_softmax, torch.log_softmax)}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["0x7", "3x0", "5x1", "7x33", "transposed", "3-d", *SPECIALS])
def test_numbers_contract(name: str, dtype: torch.dtype, case: str) -> None:
    x = layout(case, dtype, CPU, columns=61).requires_grad_()
    assert [row for row in prove(SUITES[name], FUNCTIONS[name][0], [x]) if not row.ok] == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_dimension(name: str) -> None:
    ours, theirs = FUNCTIONS[name]
    x = torch.randn(3, 4, 5)
    for dim in (-3, -2, -1, 0, 1, 2):
        torch.testing.assert_close(ours(x, dim), theirs(x, dim))
    torch.testing.assert_close(ours(torch.tensor(2.0)), theirs(torch.tensor(2.0), 0))
    for absent, dim in ((x, 3), (torch.tensor(2.0), 1)):
        with pytest.raises(IndexError):
            ours(absent, dim)
    with pytest.raises(RuntimeError, match=r"floating point, not torch\.int64"):
        ours(torch.arange(3))


@pytest.mark.parametrize("log", [False, True])
def test_opcheck(log: bool) -> None:
    x = torch.randn(2, 3, 5)
    operators = torch.ops.tilewright
    torch.library.opcheck(operators.softmax.default, (x.clone().requires_grad_(), log, "auto"))
    torch.library.opcheck(operators.softmax_backward.default, (softmax(x), torch.randn(2, 3, 5), log, "auto"))
    torch.library.opcheck(operators.softmax.default, (x.transpose(0, 2), log, "auto"))


def test_an_unknown_way_is_said() -> None:
    with pytest.raises(ValueError, match="auto, torch, triton, cuda, not 'metal'"):
        by_impl(torch.randn(3, 5), log=False, impl="metal")


def test_the_loop_in_python_is_refused_where_nobody_waits_for_it() -> None:
    suite = SUITES["softmax"]
    refuses = suite.variant("online-loop").refuses
    assert refuses(suite.workload((100, 5000), "float32")) is None
    assert refuses(suite.workload((4096, 65536), "float32")) == "458757 kernel launches a call"


def scheduled(direction: cuda.Direction, columns: int, dtype: torch.dtype, address: int = 0) -> Schedule:
    layouts = (RowLayout(address, 50, columns),) * (2 if direction == "forward" else 3)
    return cuda.schedule_of(direction, columns, dtype, layouts, False, H200)


def macros(schedule: Schedule, dtype: torch.dtype, log: bool) -> Definitions:
    return (*schedule.definitions(), ("ELEMENT", ELEMENTS[dtype]), ("LOG", int(log)))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("columns", "dtype", "address"), [(4096, torch.bfloat16, 4), (200000, torch.float32, 4), (256000, torch.float32, 0)]
)
def test_cuda_does_not_spill(
    direction: cuda.Direction, columns: int, dtype: torch.dtype, address: int, log: bool
) -> None:
    found = scheduled(direction, columns, dtype, address)
    assert found.alignment == ("PEELED" if address else "ALIGNED")
    assert spilled(cuda.SOURCE, macros(found, dtype, log))[direction] == 0


@pytest.mark.parametrize("columns", [4096, 16384])
def test_triton_does_not_spill(columns: int) -> None:
    types = {name: "*bf16" for name in ("x", "y", "dy", "dx")} | {"rows": "i32", "columns": "i32"}
    types |= {f"{name}_stride": "i64" for name in ("x", "y", "dy", "dx")}
    sizes = kernels.blocks(columns)
    for kernel in (kernels.forward_rows, kernels.backward_rows):
        code = machine_code.compiled(kernel, types, sizes | {"LOG": False}, ["x_stride"], sizes["num_warps"])
        assert machine_code.spilled(code) == 0


@pytest.mark.parametrize("capability", ["9.0", "12.0"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_schedule_holds_its_row(direction: cuda.Direction, capability: str) -> None:
    device = limits(capability)
    for columns in (1, 2, 17, 64, 65, 520, 8000, 50257, 131000, 2**20, 2**23):
        layouts = (RowLayout(2, 50, columns),) * 2
        if columns * 2 > cuda.longest(direction, device):
            continue
        found = cuda.schedule_of(direction, columns, torch.bfloat16, layouts, False, device)
        assert found.threads % found.row_threads == 0 and found.cluster <= device.largest_cluster
        assert found.row_threads * found.cluster * found.vectors * 8 >= columns + 7
