"""Attention on a GPU: the numbers contract over its options and lengths, and how it is launched."""

import functools
import itertools
from typing import Any

import pytest
import torch

from tests.gpu.kernels.launching import compiled, on_a_side_stream, replayed, values_of
from tests.kernels.attention.calls import Call, portable, wrong, wrong_packed
from tilewright.kernels.attention import attention, reference
from tilewright.kernels.attention.registered import attend
from tilewright.measure.truth.contract import compare

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PAIRED = [(torch.bfloat16, torch.float16), (torch.float32, torch.float32)]
"""Dtypes of a test's two calls: both 16-bit types run the same kernels, built for each type."""
WIDTHS = [16, 40, 64, 72, 80, 96, 112, 128, 192, 256]
LENGTHS = [(1, 1), (1, 3), (3, 1), (113, 203), (799, 3), (1023, 1025), (1025, 1023), (799, 799), (1, 1025), (1025, 1)]
OPTIONS = [
    Call(heads=6, kv_heads=2, value_size=128, batch=2, layout="positions"),
    Call(heads=4, kv_heads=1, head_size=128, value_size=32, layout="misaligned", options={"causal": True}),
    Call(layout="last"),
    Call(heads=4, kv_heads=4, value_size=32, layout="repeated", options={"causal": True}),
    Call(options={"window": (40, 20)}),
    Call(queries=311, keys=203, options={"window": (70, None), "causal": True}),
    Call(options={"softcap": 1.5}),
    Call(head_size=128, slopes=True, batch=2, heads=4, kv_heads=2, options={"causal": True}),
    Call(mask="boolean", batch=2),
    Call(mask="keys", batch=2),
    Call(mask="rows"),
    Call(mask="additive", slopes=True, options={"softcap": 2.0}),
    Call(queries=43, keys=51, options={"dropout_p": 0.3}),
    Call(head_size=128, options={"causal": True}),
    Call(options={"scale": -0.3}),
    Call(options={"deterministic": True, "window": (130, 0)}, heads=4),
    Call(batch=2, heads=16, kv_heads=2, queries=1, keys=5000, head_size=128),
    Call(heads=8, kv_heads=2, queries=3, keys=1025, value_size=128, options={"causal": True}),
    Call(heads=8, kv_heads=2, queries=2, keys=3000, slopes=True, mask="additive", options={"softcap": 3.0}),
    Call(heads=8, kv_heads=8, queries=1, keys=799, head_size=72, options={"window": (600, None)}),
    Call(queries=0),
    Call(keys=0),
]
PAIRS = [(203, 311), (113, 1025), (1023, 203), (799, 799), (1025, 1023), (203, 113)]
"""Lengths of the options that name none."""
PORTABLE = [(64, 64), (128, 128), (256, 256), (72, 40), (40, 128), (192, 16)]


def sized(call: Call, number: int, **sizes: Any) -> Call:
    """`call` with its sizes, or larger ones than its class's where it names none."""
    queries, keys = PAIRS[number % len(PAIRS)]
    given = {"queries": queries, "keys": keys, "head_size": 64}
    kept = {name: value for name, value in vars(call).items() if value != getattr(Call(), name)}
    return Call(**(given | kept | sizes))


@pytest.mark.parametrize("dtypes", PAIRED, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_head_sizes(width: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    assert wrong(Call(queries=113, keys=203, head_size=width, dtype=dtypes[0]), GPU) == []
    other = WIDTHS[-1 - WIDTHS.index(width)]
    call = Call(queries=203, keys=113, head_size=width, value_size=other, dtype=dtypes[1], options={"causal": True})
    assert wrong(call, GPU) == []


@pytest.mark.parametrize("dtypes", PAIRED, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(lengths: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    for (causal, dtype), outliers in itertools.product(zip((False, True), dtypes, strict=True), (False, True)):
        call = Call(
            queries=lengths[0], keys=lengths[1], head_size=64, dtype=dtype, outliers=outliers,
            options={"causal": causal},
        )  # fmt: skip
        assert wrong(call, GPU) == []


@pytest.mark.parametrize("dtypes", PAIRED, ids=str)
@pytest.mark.parametrize("number", range(len(OPTIONS)), ids=lambda number: str(OPTIONS[number]))
def test_options(number: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    for outliers in (False, True):
        assert wrong(sized(OPTIONS[number], number, dtype=dtypes[number % 2], outliers=outliers), GPU) == []


@pytest.mark.parametrize("widths", PORTABLE, ids=str)
def test_the_kernels_for_any_gpu(widths: tuple[int, int]) -> None:
    for number, causal in itertools.product(range(3), (False, True)):
        queries, keys = ((1023, 203), (113, 1025), (1, 3))[number]
        call = Call(
            heads=4, queries=queries, keys=keys, head_size=widths[0], value_size=widths[1],
            dtype=DTYPES[(number + causal) % 2], outliers=causal, options={"causal": causal},
        )  # fmt: skip
        assert wrong(call, GPU, impl=portable) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_of_nearly_one_have_gradients_of_nearly_zero(dtype: torch.dtype) -> None:
    for seed, keys in itertools.product(range(8), (2, 3, 20)):
        call = Call(heads=4, queries=3, keys=keys, head_size=64, dtype=dtype, outliers=True, options={"causal": True})
        assert wrong(call, GPU, seed) == []


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("kind", range(3))
def test_packed_sequences(kind: int, number: int) -> None:
    """Each dtype with all widths and with all options."""
    options: dict[str, Any] = ({}, {"causal": True}, {"window": (30, 50), "softcap": 2.0})[kind]
    widths, dtype = ((40, 24), (64, 64), (128, 32), (80, 128), (256, 16))[number], DTYPES[(kind + number) % 3]
    assert wrong_packed(([113, 0, 203, 1, 300], [50, 3, 203, 0, 77]), widths, dtype, GPU, **options) == []


def test_the_gradient_of_the_log_sum_exp() -> None:
    tensors = drawn(dtype=torch.bfloat16)
    results = []
    for impl, kind in ((attention, torch.bfloat16), (reference.attention, torch.bfloat16), (reference.attention, None)):
        inputs = [x.detach().to(kind or torch.float64).requires_grad_() for x in tensors]
        out, lse = impl(*inputs, **({"return_lse": True} if impl is attention else {}), causal=True)
        results.append(torch.autograd.grad(out.sum() + lse.square().sum(), inputs))
    for mine, eager, true in zip(*results, strict=True):
        assert compare(mine, eager, true).ok


@pytest.mark.parametrize("dtype", DTYPES[:1], ids=str)
def test_one_hundred_thousand_keys(dtype: torch.dtype) -> None:
    q, k, v = (x.detach() for x in drawn(dtype=dtype, queries=131072, keys=131072, heads=1, kv_heads=1))
    place = torch.tensor([0, 1, 65537, 131071], device=GPU)
    out, lse = attention(q, k, v, return_lse=True)
    true, true_lse = reference.attention(q[:, :, place].double(), k.double(), v.double())
    eager, _ = reference.attention(q[:, :, place], k, v)
    assert compare(out[:, :, place], eager, true).ok
    torch.testing.assert_close(lse[:, :, place].double(), true_lse, rtol=1e-6, atol=1e-5)
    causal = attention(q, k, v, causal=True)[:, :, place[-2]]
    seen = slice(0, 65538)
    options = (q[:, :, place[-2:-1]], k[:, :, seen], v[:, :, seen])
    true, eager = (reference.attention(*(x.to(kind) for x in options))[0] for kind in (torch.float64, dtype))
    assert compare(causal[:, :, None], eager, true).ok


@pytest.mark.parametrize("keys", [1000, 30000])
def test_parts_of_a_cache_are_joined_whoever_comes_last(keys: int) -> None:
    """Calls of two streams and of a graph share no count of arrivals."""
    q, k, v = (x.detach() for x in drawn(queries=1, keys=keys, heads=16, kv_heads=2, head_size=128, batch=2))
    first = attention(q, k, v)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        captured = attention(q, k, v)
    side.wait_stream(torch.cuda.current_stream())
    found = []
    for _ in range(50):
        graph.replay()
        with torch.cuda.stream(side):
            found.append(attention(q, k, v))
        found.append(attention(q, k, v))
    torch.cuda.synchronize()
    assert all(torch.equal(out, first) for out in [*found, captured])


def drawn(**sizes: Any) -> list[torch.Tensor]:
    return Call(**({"queries": 257, "keys": 257, "head_size": 64} | sizes)).inputs(GPU)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_streams_graphs_and_compilation(dtype: torch.dtype) -> None:
    inputs = drawn(dtype=dtype)
    call = functools.partial(attention, causal=True)
    plain = values_of(call, inputs)
    for impl in (on_a_side_stream, replayed, compiled):
        for mine, true in zip(impl(call, inputs), plain, strict=True):
            torch.testing.assert_close(mine, true, rtol=2e-2, atol=2e-2)


def test_dropout_draws_anew_in_each_replay_and_the_same_in_backward() -> None:
    inputs = drawn(dtype=torch.float32)
    v = torch.eye(257, 256, device=GPU).expand(1, 2, 257, 256).contiguous().requires_grad_()

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attention(q, k, v, dropout_p=0.5)
        return out

    torch.manual_seed(1)
    first, *_ = replayed(call, (*inputs[:2], v))
    torch.manual_seed(1)
    second, *_ = replayed(call, (*inputs[:2], v), times=2)
    assert ((first == 0) != (second == 0)).any()
    torch.manual_seed(1)
    out = call(*inputs[:2], v)
    (dv,) = torch.autograd.grad(out.sum(), v)
    # With the identity for v, out is the dropped weights, and dv their sums over the queries.
    torch.testing.assert_close(dv[..., 0][..., :256], out.sum(2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_the_same_bits_in_every_run(width: int) -> None:
    inputs = drawn(head_size=width, queries=1025, keys=1025, heads=4, kv_heads=2)
    call = functools.partial(attention, causal=True, deterministic=True)
    first = values_of(call, inputs)
    for _ in range(1000):
        assert all(torch.equal(mine, true) for mine, true in zip(values_of(call, inputs), first, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_operators_are_registered_well(dropout: float) -> None:
    q, k, v = drawn(queries=65, keys=129, layout="positions")
    options = (None, None, None, None, 0.125, None, 0, 0.0, dropout, 0, 0, False, "auto")
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.tilewright.attention.default, (q, k, v, *options), test_utils=checks)


def test_memory_is_linear_in_the_length() -> None:
    """Forward and backward, beside the inputs: from 1,024 positions to 131,072 it doubles as they do."""
    peaks = []
    for length in (1024 * 2**i for i in range(8)):
        q, k, v = drawn(queries=length, keys=length, heads=2, kv_heads=2, head_size=128)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = attention(q, k, v, causal=True)
        torch.autograd.grad(out, (q, k, v), out.detach())
        peaks.append((torch.cuda.max_memory_allocated() - before) / length)
        del q, k, v, out
    # What a position takes: the result, four gradients in 16 bits, sums of dQ in fp32, and three numbers a head.
    assert max(peaks) <= 2 * (5 * 128 * 2 + 128 * 4 + 3 * 4) + 2**20 / 1024
    assert max(peaks[3:]) <= 1.05 * peaks[-1]


def test_more_elements_than_31_bits_count() -> None:
    q = torch.zeros(1, 1, 64, 64, device=GPU, dtype=torch.bfloat16)
    k = torch.zeros(1, 2**25 + 64, 1, 64, device=GPU, dtype=torch.bfloat16).transpose(1, 2)
    v = torch.zeros_like(k)
    k[0, 0, -1] = 4.0
    q[:] = 4.0
    v[0, 0, -1] = 2.0
    out = attention(q, k, v)
    assert out.amin().item() == 2.0
    assert attend(q, k, v, *[None] * 4, 0.125, None, None, 0.0, 0.0, 0, 0, False, "triton")[0].amin().item() == 2.0
