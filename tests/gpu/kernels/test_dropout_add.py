"""dropout_add on a GPU: eager's mask to the bit, the numbers contract, and how it is launched."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from tests.contract import broken
from tests.gpu.kernels.launching import FOUR, in_turn
from tests.kernels.row_operators import layouts
from tilewright.bench.catalogue import suite
from tilewright.kernels.dropout_add import dropout_add

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
P = 0.37
COUNTS = (1, 7, 10, 12, 1000, 4096 * 33, 3 * 10**6, 3 * 10**6 + 2, 3 * 10**6 + 1, 1 << 23)
OFFSETS = (0, 12, 4 * 2**31)


def kept(call: Callable[[], torch.Tensor], offset: int) -> tuple[torch.Tensor, int]:
    """The ones that `call` keeps with a 64-bit seed and this offset, and the offset after it."""
    torch.manual_seed(0x9234_5678_9ABC_DEF0)
    generator = torch.cuda.default_generators[0]
    generator.set_offset(offset)
    return call() != 0, generator.get_offset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("start", [0, 1, 2, 4])
def test_masks_and_offsets_are_eagers(start: int, dtype: torch.dtype) -> None:
    for count, offset in itertools.product(COUNTS, OFFSETS):
        ones = torch.ones(count + start, device=GPU, dtype=dtype)[start:].requires_grad_()
        zeros = torch.zeros(count, device=GPU, dtype=dtype)
        eager = kept(lambda: F.dropout(ones, P), offset)  # noqa: B023
        ours = kept(lambda: dropout_add(ones, zeros, P), offset)  # noqa: B023
        assert ours[1] == eager[1], (count, offset)
        assert torch.equal(ours[0], eager[0]), (count, offset)
        back = kept(lambda: torch.autograd.grad(dropout_add(ones, zeros, P).sum(), ones)[0], offset)  # noqa: B023
        assert torch.equal(back[0], eager[0]), (count, offset)


@pytest.mark.parametrize("kind", ["none", "gelu"])
def test_layouts_have_the_mask_that_eager_gives_them(kind: str) -> None:
    act = F.gelu if kind == "gelu" else torch.nn.Identity()
    for rows, columns in ((512, 768), (131, 37), (131, 38)):
        for name, x in layouts(rows, columns, torch.bfloat16, "cuda").items():
            x.abs_().add_(1)
            eager = kept(lambda: F.dropout(act(x), P), 0)  # noqa: B023
            ours = kept(lambda: dropout_add(x, torch.zeros_like(x), P, activation=kind), 0)  # noqa: B023
            assert ours[1] == eager[1], (rows, name)
            assert torch.equal(ours[0], eager[0]), (rows, name)


SHAPES = [(0, 5), (1, 1), (1000, 1), (131, 37), (333, 1026), (1024, 4096)]
KINDS = ["none", "gelu", "gelu_tanh", "silu"]


@pytest.mark.parametrize(("shape", "kind", "dtype"), in_turn(itertools.product(SHAPES, KINDS), FOUR), ids=str)
def test_the_numbers_contract(shape: tuple[int, int], kind: str, dtype: torch.dtype) -> None:
    x, residual = (layouts(*shape, dtype, "cuda", seed=seed) for seed in (0, 1))
    for name in x:
        inputs = x[name].requires_grad_(), residual["strided"].requires_grad_(), P, kind
        assert broken(suite("dropout_add"), inputs, suite("dropout_add").variant("tilewright").function) == [], name


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_certain_outcomes_draw_nothing(p: float) -> None:
    x, residual = torch.randn(2, 1000, device=GPU)
    ours, offset = kept(lambda: dropout_add(x, residual, p) - (F.dropout(x, p) + residual), 12)
    assert not ours.any()
    assert offset == 12


def test_a_dropped_infinity_is_nan_as_in_eager() -> None:
    x = torch.full((4096,), float("inf"), device=GPU)
    eager = kept(lambda: F.dropout(x, P).isnan(), 0)[0]
    assert torch.equal(kept(lambda: dropout_add(x, torch.zeros_like(x), P).isnan(), 0)[0], eager)


def test_a_captured_graph_draws_as_eagers_does() -> None:
    """Twice in a graph, forward and backward, three replays: the masks, and what the generator gives afterwards."""
    x, zeros = torch.ones(1000, 3001, device=GPU, requires_grad=True), torch.zeros(1000, 3001, device=GPU)

    def recorded(call: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        def step() -> list[torch.Tensor]:
            outs = [call(), call()]
            return [*outs, *(torch.autograd.grad(out.sum(), x)[0] for out in outs)]

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        torch.manual_seed(7)
        found = []
        for _ in range(3):
            graph.replay()
            found += [result.detach() != 0 for result in results]
        return [*found, torch.rand(9, device=GPU)]

    ours, eagers = recorded(lambda: dropout_add(x, zeros, P)), recorded(lambda: F.dropout(x, P))
    assert [torch.equal(mine, true) for mine, true in zip(ours, eagers, strict=True)] == [True] * 13
    assert not torch.equal(ours[0], ours[4])


def test_more_elements_than_31_bits_count() -> None:
    ones = torch.ones(2**31 + 24, device=GPU, dtype=torch.bfloat16)
    zeros = torch.zeros_like(ones)
    ours = kept(lambda: dropout_add(ones, zeros, P), 0)
    eager = kept(lambda: F.dropout(ones, P), 0)
    assert ours[1] == eager[1]
    assert torch.equal(ours[0], eager[0])
