"""The linear layer with GELU, or with dropout and residual, on a GPU: the contract, eager's mask, launches."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.contract import broken
from tests.gpu.kernels.launching import compiled, on_a_side_stream, replayed, values_of
from tests.kernels.row_operators import layouts
from tilewright.bench.catalogue import suite
from tilewright.kernels.linear import cuda, gelu_fused, linear_dropout_add, linear_gelu

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability(GPU) == (9, 0)
hopper = pytest.mark.skipif(not HOPPER, reason="the kernel is for compute capability 9.0")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(0, 8, 16), (1, 1, 1), (131, 37, 7), (1000, 1, 64), (129, 8, 8), (1000, 776, 72), (300, 2056, 1024)]
"""Rows of no whole vectors, which PyTorch computes, and of whole ones."""
FUSED = [(1, 8, 8), (129, 8, 8), (256, 256, 64), (1000, 776, 72), (700, 2056, 1032), (8192, 512, 64)]
"""One tile, tails in each direction, many tiles a program."""


def matrices(m: int, n: int, k: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, weight, bias and residual, with gradients."""
    generator = torch.Generator(GPU).manual_seed(0)
    shapes = ((m, k), 1.0), ((n, k), k**-0.5), ((n,), 1.0), ((m, n), 1.0)
    made = [torch.randn(shape, generator=generator, device=GPU).mul_(by).to(dtype) for shape, by in shapes]
    return [tensor.requires_grad_() for tensor in made]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_keeps_the_contract(sizes: tuple[int, int, int], dtype: torch.dtype, approximate: str) -> None:
    assert broken(suite("linear_gelu"), (*matrices(*sizes, dtype)[:3], approximate), linear_gelu) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_dropout_add_keeps_the_contract(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    assert broken(suite("linear_dropout_add"), (*matrices(*sizes, dtype), 0.3), linear_dropout_add) == []


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", FUSED, ids=str)
def test_the_fused_kernel_keeps_the_contract(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight, bias, _ = (tensor.detach() for tensor in matrices(*sizes, dtype))
    assert cuda.refuses(x, weight) is None
    for approximate in ("none", "tanh"):
        gelu: Callable[..., torch.Tensor] = lambda *inputs: gelu_fused(*inputs)[0]  # noqa: E731
        assert broken(suite("linear_gelu"), (x, weight, bias, approximate), gelu) == [], approximate


@hopper
def test_every_element_is_written_again_and_again() -> None:
    """The same bits at every run, whatever the result's memory held."""
    x, weight, bias, _ = (tensor.detach() for tensor in matrices(1000, 776, 200, torch.bfloat16))
    found = []
    for _ in range(20):
        y = gelu_fused(x, weight, bias)[0]
        found.append(y.clone())
        y.fill_(float("nan"))
        del y
    assert all(torch.equal(found[0], other) for other in found[1:])


@hopper
@pytest.mark.parametrize("way", ["misaligned", "strided", "transposed", "every other"])
def test_layouts_are_copied_first(way: str) -> None:
    x = layouts(130, 72, torch.bfloat16, "cuda")[way]
    weight = layouts(264, 72, torch.bfloat16, "cuda", seed=1)[way]
    expected = gelu_fused(x.clone(memory_format=torch.contiguous_format), weight.contiguous().clone(), None)[0]
    assert torch.equal(gelu_fused(x, weight, None)[0], expected)


@hopper
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_every_value(approximate: str) -> None:
    """Two roundings in bf16 and a polynomial in fp16: 1.5 units in the last place, below -3 an absolute error."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=GPU).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    rows, weight = x.new_zeros(len(x), 8), x.new_zeros(8, 8)
    rows[:, 0], weight[:, 0] = x, 1
    y = gelu_fused(rows, weight, None, approximate)[0]
    true = F.gelu(x.double(), approximate=approximate)
    ulp = torch.exp2(true.abs().clamp(min=2**-126).log2().floor() - 7)
    off = (y[:, 3].double() - true).abs()
    assert (off / ulp)[x >= -3].max() < 1.5
    assert off[x < -3].max() < 2.5e-5
    assert (y == y[:, :1]).all()


@hopper
def test_nan_and_infinity_are_eagers() -> None:
    x, weight, bias, _ = (tensor.detach() for tensor in matrices(256, 256, 64, torch.bfloat16))
    bias[1], bias[2], bias[3] = float("nan"), float("inf"), float("-inf")
    pairs = [(gelu_fused(x, weight, bias, how)[0], F.gelu(F.linear(x, weight, bias), approximate=how)) for how in
             ("none", "tanh")]  # fmt: skip
    for found, eager in pairs:
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(kind(found), kind(eager))


@hopper
def test_beyond_32_bits() -> None:
    m, n, k = 2**31 // 8192 + 3000, 8192, 8
    x, weight = torch.randn(m, k, device=GPU).bfloat16(), torch.randn(n, k, device=GPU).bfloat16()
    y = gelu_fused(x, weight, None)[0]
    for part in (slice(0, 64), slice(m - 64, m)):
        torch.testing.assert_close(y[part], F.gelu(x[part] @ weight.t()))


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "gelu": lambda x, weight, bias, _: linear_gelu(x, weight, bias, "tanh"),
    "dropout_add": lambda x, weight, bias, residual: linear_dropout_add(x, weight, bias, residual, 0.2),
}


@pytest.mark.parametrize("name", CALLS)
def test_launched_in_every_way(name: str) -> None:
    inputs = matrices(512, 264, 72, torch.bfloat16)
    inputs = [*inputs[:3], inputs[3] if name == "dropout_add" else inputs[3].detach()]

    def seeded(way: Callable[..., list[torch.Tensor]]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        return way(CALLS[name], inputs)

    plain = seeded(values_of)
    for way in (on_a_side_stream, compiled):
        for found, expected in zip(seeded(way), plain, strict=True):
            torch.testing.assert_close(found, expected)
    first, second = replayed(CALLS[name], inputs), replayed(CALLS[name], inputs, times=2)
    assert all(value.isfinite().all() for value in first)
    assert torch.equal(first[0], second[0]) == (name == "gelu")


@hopper
def test_a_graph_draws_a_new_mask_at_each_replay_and_the_backward_draws_the_same() -> None:
    x, weight, bias, residual = matrices(512, 264, 72, torch.bfloat16)
    call = CALLS["dropout_add"]
    y, dx, _, dbias, _ = replayed(call, (x, weight, bias, torch.zeros_like(residual).requires_grad_()), times=3)
    kept = y != 0
    # Each dropped gradient and the sum are rounded to bf16.
    torch.testing.assert_close(dbias.float(), (2 * y.float() * kept / 0.8).sum(0), rtol=2**-7, atol=0.5)
    assert 0.75 < kept.float().mean() < 0.85 and dx.isfinite().all()


@hopper
def test_the_choice_leaves_the_generator_alone_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    x, weight, bias, _ = (tensor.detach() for tensor in matrices(640, 264, 136, torch.bfloat16))
    before = torch.cuda.get_rng_state()
    first = linear_gelu(x, weight, bias)
    (entry,) = tmp_path.rglob("*.race.json")
    assert set(json.loads(entry.read_text())) == {"fused", "apart"}
    monkeypatch.setattr("tilewright.launch.race.run", lambda *_: pytest.fail("raced again"))
    assert torch.equal(linear_gelu(x, weight, bias), first)
    assert torch.equal(torch.cuda.get_rng_state(), before)
