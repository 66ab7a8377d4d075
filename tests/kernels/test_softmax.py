"""Softmax and log-softmax without a GPU, beside `test_rows.py`: dimensions, refusals, schedules."""

import pytest
import torch

from tests.kernels.devices import limits
from tilewright.bench.suites.softmax import SUITES
from tilewright.kernels.row import RowLayout
from tilewright.kernels.softmax import by_impl, cuda, log_softmax, softmax

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


def test_an_unknown_way_is_said() -> None:
    with pytest.raises(ValueError, match="auto, torch, triton, cuda, not 'metal'"):
        by_impl(torch.randn(3, 5), log=False, impl="metal")


def test_the_loop_in_python_is_refused_where_nobody_waits_for_it() -> None:
    suite = SUITES["softmax"]
    refuses = suite.variant("online-loop").refuses
    assert refuses(suite.workload((100, 5000), "float32")) is None
    assert refuses(suite.workload((4096, 65536), "float32")) == "458757 kernel launches a call"


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
