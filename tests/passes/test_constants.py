"""Constants of a program: tensors copied to the GPU are held by the graph, numbers held as tensors are numbers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.backend.compiling import compiled
from tests.gpu.kernels.launching import in_turn
from tests.tables import programs
from tilewright.backend import recording
from tilewright.hardware.target import target_named
from tilewright.passes.constants import copy_constants_once

GPU = torch.device("cuda:0")


def to_gpu(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.ops.aten._to_copy.default(x, dtype=dtype or x.dtype, memory_format=torch.preserve_format)


def captured(program: Callable[[Tensor], Tensor | tuple[Tensor, ...]]) -> fx.GraphModule:
    """The graph of a program whose input is on a GPU, as are the results of `to_gpu`; nothing runs there."""
    with FakeTensorMode() as mode:
        module = make_fx(program)(torch.empty(8, 8))
        for node in module.graph.nodes:
            if node.op == "placeholder" or "memory_format" in node.kwargs:
                value = node.meta["val"]
                meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                node.meta["val"] = FakeTensor(mode, meta, GPU)
    return module


def buckets(size: int = 8) -> Tensor:
    distance = torch.arange(size)[:, None] - torch.arange(size)
    return (distance.abs() + 1).log().mul(3).to(torch.int64)


def test_what_is_made_of_nothing_is_held_by_the_graph() -> None:
    module = captured(lambda x: x + to_gpu(buckets()))
    copy_constants_once(module.graph, target_named("h200"))
    module.graph.lint()
    assert [node.op for node in module.graph.nodes] == ["placeholder", "get_attr", "call_function", "output"]
    (held,) = module.graph.find_nodes(op="get_attr")
    assert held.meta["val"].device == GPU
    assert torch.equal(getattr(module, held.target).cpu(), buckets())


def test_each_copy_is_held_in_its_own_dtype_and_layout() -> None:
    module = captured(lambda x: (x + to_gpu(buckets().t(), torch.float32)) * to_gpu(buckets().t()))
    copy_constants_once(module.graph, target_named("h200"))
    held = [getattr(module, node.target) for node in module.graph.find_nodes(op="get_attr")]
    assert [one.dtype for one in held] == [torch.float32, torch.int64]
    assert all(torch.equal(one.cpu().long(), buckets().t()) and one.stride() == (1, 8) for one in held)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: to_gpu(buckets()),
        lambda x: to_gpu(buckets()).t(),
        lambda x: x + to_gpu(buckets()).add_(1),
        lambda x: x + to_gpu(torch.rand(8, 8)),
        lambda x: x + to_gpu(x + buckets()),
        lambda x: x + to_gpu(torch.tensor(3)),
        lambda x: x[0, 0] + to_gpu(torch.zeros(2**23)),
    ],
    ids=["returned", "a view returned", "written to", "drawn", "of an input", "one number", "large"],
)
def test_what_else_is_copied_stays(program: Callable[[Tensor], Tensor]) -> None:
    module = captured(program)
    before = len(module.graph.nodes)
    copy_constants_once(module.graph, target_named("h200"))
    assert len(module.graph.nodes) == before


RTOL = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float64: 1e-12}
READS = programs(Path(__file__).with_name("constants.txt"), "read")


@pytest.mark.parametrize(("name", "dtype"), in_turn(READS, [tuple(RTOL)]))
def test_results_are_eagers(name: str, dtype: torch.dtype) -> None:
    function, reads = READS[name].function, READS[name].fields["tensors"]
    x = torch.randn(5, 16, dtype=dtype)
    with recording() as record:
        call = compiled(function)
        for _ in range(2):
            torch.testing.assert_close(call(x), function(x), rtol=RTOL[dtype], atol=1e-5)
    if reads:
        (graph,) = record.graphs
        (kernel,) = [region.lowered for region in graph.plan.fusion.regions]
        assert len(kernel.inputs) == int(reads)
