"""Operators of rows without a GPU: the numbers contract of what PyTorch computes then, and how rows lie; softmax."""

import pytest
import torch

from tests.gpu.kernels.launching import DTYPES, in_turn
from tests.kernels.devices import limits
from tests.kernels.row_operators import CALLS, layout, wrong
from tilewright.bench.suites.softmax import SUITES
from tilewright.kernels.row import RowLayout, alignment_of
from tilewright.kernels.softmax import cuda, log_softmax, softmax

CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "case", "dtype"), in_turn(CALLS, [DTYPES]), ids=str)
def test_the_numbers_contract(name: str, case: str, dtype: torch.dtype) -> None:
    assert wrong(name, layout(case, dtype, CPU, columns=61)) == []


def test_how_tensors_lie_together() -> None:
    contiguous = RowLayout(0, 9, 5000)
    assert alignment_of(5000, 2, (contiguous, RowLayout(64, 9, 5008))) == "ALIGNED"
    assert alignment_of(5000, 2, (contiguous, RowLayout(64, 9, 5001))) == "SHIFTED"
    assert alignment_of(5000, 2, (contiguous, RowLayout(2, 9, 5000))) == "SHIFTED"
    assert alignment_of(3, 2, (RowLayout(0, 1, 3), RowLayout(0, 1, 7))) == "PEELED", "one row has no next one"
    assert alignment_of(5001, 2, (RowLayout(0, 9, 5001),) * 2) == "PEELED"
    assert alignment_of(16392, 2, (RowLayout(0, 9, 16392),)) == "PEELED", "long rows are counted from lines"


FUNCTIONS = {"softmax": (softmax, torch.softmax), "log_softmax": (log_softmax, torch.log_softmax)}


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


def test_the_loop_in_python_is_refused_where_nobody_waits_for_it() -> None:
    suite = SUITES["softmax"]
    refuses = suite.variant("online-loop").refuses
    assert refuses(suite.workload((100, 5000), "float32")) is None
    assert refuses(suite.workload((4096, 65536), "float32")) == "458757 kernel launches a call"


@pytest.mark.parametrize("capability", ["9.0", "12.0"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_schedule_holds_its_row(direction: cuda.Direction, capability: str) -> None:
    device = limits(capability)
    for columns in (8193, 10000, 16384, 50257, 131000, 2**20, 2**23):
        layouts = (RowLayout(2, 50, columns),) * 2
        if columns * 2 > cuda.longest(direction, device):
            continue
        found = cuda.schedule_of(direction, columns, torch.bfloat16, layouts, False, device)
        assert found.threads % found.row_threads == 0 and found.cluster <= device.largest_cluster
        assert found.row_threads * found.cluster * found.vectors * 8 >= columns + 7
