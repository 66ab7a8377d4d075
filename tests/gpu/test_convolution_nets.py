"""Convolution nets and upsampling in compiled graphs on a GPU: the numbers contract, and which kernels run."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract import keeps_contract, launched, targets
from tests.operators.pools import APART, LAYOUTS, OVERLAPPING, image, library_pools
from tests.passes.test_channels_last import Classifier, DiffusionBlock, trains_as_eager
from tests.passes.test_one_row_convolutions import Gated, Volume, takes_the_layout
from tests.passes.test_patch_convolutions import Embedded, of_convnets, of_transformers
from tests.passes.test_upsampling import CALLS
from tilewright.backend import recording
from tilewright.choose import layouts

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
NETS = {
    "batch norms": lambda: (Classifier(32), (8, 32, 14, 14)),
    "one channel more": lambda: (Classifier(33), (5, 33, 15, 13)),
    "group norms": lambda: (DiffusionBlock(32, 4, True), (2, 32, 14, 18)),
    "each channel a group": lambda: (DiffusionBlock(40, 40, False), (3, 40, 30, 34)),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", NETS)
def test_training_keeps_the_contract(name: str, layout: torch.memory_format) -> None:
    model, shape = NETS[name]()
    model = model.to(GPU, torch.bfloat16).to(memory_format=layout)
    x = (torch.randn(shape, device=GPU) + 1).bfloat16().contiguous(memory_format=layout)
    record = trains_as_eager(model, x)
    assert record.fallbacks == []
    assert not [call for call in launched(record) if "pool" in call or "norm" in call or "index_put" in call]


@pytest.mark.parametrize("norm", ["batch", "group", "instance"])
@pytest.mark.parametrize("places", [1, 3])
def test_sequences_and_volumes_take_the_layout(places: int, norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # By rule: a race between kernels of a few microseconds may go either way.
    monkeypatch.setattr(layouts, "layout_race", lambda convolution: None)
    of_sequences = {"batch": nn.BatchNorm1d(32), "group": nn.GroupNorm(4, 32), "instance": nn.InstanceNorm1d(32)}
    of_volumes = {"batch": nn.BatchNorm3d(32), "group": nn.GroupNorm(4, 32), "instance": nn.InstanceNorm3d(32)}
    model = Gated(of_sequences[norm]) if places == 1 else Volume(of_volumes[norm])
    shape = (3, 32, 38) if places == 1 else (2, 32, 6, 8, 4)
    x = (torch.randn(shape, device=GPU) + 1).bfloat16()
    record = trains_as_eager(model.to(GPU, torch.bfloat16), x)
    assert record.fallbacks == []
    takes_the_layout(record)


@pytest.mark.parametrize("tokens", [of_transformers, of_convnets])
@pytest.mark.parametrize("window", [4, 14, 16])
def test_patches_are_multiplied(window: int, tokens: Callable[[Tensor], Tensor]) -> None:
    model = Embedded(nn.Conv2d(3, 96, window, window), tokens).to(GPU, torch.bfloat16)
    record = trains_as_eager(model, torch.randn(4, 3, 112, 112, device=GPU).bfloat16())
    assert record.fallbacks == [] and not [target for target in targets(record) if "convolution" in target]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*APART, *OVERLAPPING])
def test_pools_give_eagers_values_positions_and_gradients(name: str, layout: str) -> None:
    assert not library_pools(name, image(layout).to(GPU, memory_format=LAYOUTS[layout]))


def test_biases_are_no_part_of_convolutions() -> None:
    layer = nn.Conv2d(32, 48, 3, padding=1).to(GPU, torch.bfloat16)

    def program(x: Tensor) -> Tensor:
        return torch.relu(layer(x))

    x = torch.randn(4, 32, 20, 20, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    with recording() as record:
        torch.compile(program, backend="tilewright")(x).sum().backward()
    forward, backward = (graph.plan.graph for graph in record.graphs)
    (called,) = [node for node in forward.nodes if node.target is torch.ops.aten.convolution.default]
    (gradient,) = [node for node in backward.nodes if node.target is torch.ops.aten.convolution_backward.default]
    assert called.args[2] is None and gradient.args[10][2] is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", range(len(CALLS)), ids=[*CALLS].__getitem__)
def test_gradients_are_sums_of_results(number: int, dtype: torch.dtype) -> None:
    """Each call in both dtypes and both layouts, not in all four of their pairs."""
    layout = [*LAYOUTS.values()][(number + (dtype == torch.bfloat16)) % 2]
    x = torch.randn(2, 5, 7, 11, device=GPU).to(dtype).contiguous(memory_format=layout).requires_grad_()
    assert set(launched(keeps_contract([*CALLS.values()][number], [x]))) == {"kernel"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loss_of_upsampled_classes_is_kernels_alone(dtype: torch.dtype) -> None:
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.interpolate(x, (36, 44), mode="bilinear"), target, ignore_index=3)

    x = torch.randn(2, 19, 9, 11, device=GPU).to(dtype).requires_grad_()
    target = torch.randint(19, (2, 36, 44), device=GPU)
    assert set(launched(keeps_contract(loss, [x, target]))) == {"kernel"}
