"""Elementwise C++ kernels that transpose visit their tensors in tiles, with remainders, each element once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.backend.compiling import compiled
from tilewright.backend import recording

CASES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "primes": (lambda x: x.t().contiguous() * 2 + 1, (67, 131)),
    "one row left": (lambda x: x.t().contiguous() * 2, (17, 65)),
    "less than a tile": (lambda x: x.t().contiguous() * 2, (5, 7)),
    "beside its transpose": (lambda x: x.t() + x, (129, 129)),
    "channels last": (lambda x: x.permute(0, 2, 3, 1).contiguous() * 2, (3, 5, 9, 31)),
    "heads": (lambda x: x.transpose(1, 2).contiguous().exp(), (2, 65, 3, 4)),
    "by a number for each row": (lambda x: x.t().contiguous() * x[0, :, None], (40, 70)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", CASES)
def test_each_element_is_visited_once(name: str, dtype: torch.dtype) -> None:
    function, shape = CASES[name]
    x = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    with recording() as record:
        result = compiled(function)(x)
    torch.testing.assert_close(result, function(x))
    (source,) = (source for graph in record.graphs for source in graph.plan.sources.values())
    assert ("tile_end" in source) == (name != "heads")
