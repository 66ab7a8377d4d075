"""The numbers contract on figures worked out by hand; the float64 truth against formulas in float64."""

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask

from tilewright.measure.truth.contract import compare, ulp
from tilewright.measure.truth.reference import JUMPS, Pair, reference_run
from tilewright.measure.truth.verify import verify
from tilewright.operators import table


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def floats(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


# The contract


@pytest.mark.parametrize(
    ("value", "dtype", "spacing"),
    [
        (1.0, torch.float32, 2.0**-23),
        (1.999, torch.float32, 2.0**-23),
        (2.0, torch.float32, 2.0**-22),
        (-300.0, torch.bfloat16, 2.0),
        (0.0, torch.float16, 2.0**-24),
        (1e-7, torch.float16, 2.0**-24),
        (1e300, torch.float16, 32.0),
        (1.0, torch.float64, 2.0**-52),
    ],
)
def test_ulp_is_the_distance_to_the_next_number(value: float, dtype: torch.dtype, spacing: float) -> None:
    assert ulp(value, dtype) == spacing


def test_figures_of_a_known_error() -> None:
    truth = doubles(3.0, 4.0)
    row = compare(floats(3.0, 4.5), floats(3.25, 4.0), truth, direction="bwd", tensor="w")
    assert (row.direction, row.tensor, row.dtype) == ("bwd", "w", "float32")
    assert (row.error, row.eager_error) == (0.1, 0.05)
    assert (row.max_error, row.eager_max_error) == (0.5, 0.25)
    assert row.bound == 2 * 0.05 + 4 * 2.0**-23
    assert row.max_bound == 2 * 0.25 + 4 * 2.0**-21
    assert row.ok


def test_each_bound_alone_can_fail() -> None:
    truth = torch.ones(1000, dtype=torch.float64)
    eager = torch.ones(1000)
    everywhere = torch.full((1000,), 1 + 5 * 2.0**-23)
    once = torch.ones(1000)
    once[7] += 5 * 2.0**-23
    spread = compare(everywhere, eager, truth)
    assert not spread.ok and spread.error > spread.bound
    peak = compare(once, eager, truth)
    assert not peak.ok and peak.error < peak.bound and peak.max_error > peak.max_bound
    assert compare(torch.full((1000,), 1 + 4 * 2.0**-23), eager, truth).ok


@pytest.mark.parametrize("ours", [math.nan, math.inf, -math.inf, 1.0])
@pytest.mark.parametrize("theirs", [math.nan, math.inf, -math.inf, 1.0])
def test_specials_appear_where_eager_has_them(ours: float, theirs: float) -> None:
    same = ours == theirs or (math.isnan(ours) and math.isnan(theirs))
    assert compare(floats(2.0, ours), floats(2.0, theirs), doubles(2.0, theirs)).ok is same


ONES, EMPTY, TINY = torch.ones(2, 1), torch.ones(0, 3), doubles(3e-300, 4e-300)
COUNTS = torch.tensor([1, 2, 3, 2**62 + 1])
LARGE = torch.tensor([math.inf], dtype=torch.float16)
COMPLEX = torch.tensor([1 + 2j], dtype=torch.complex64)


@pytest.mark.parametrize(
    ("ours", "eager", "truth", "ok"),
    [
        (LARGE, LARGE, doubles(70000.0), True),
        # What overflows in eager must overflow.
        (LARGE.clamp(max=65504.0), LARGE, doubles(70000.0), False),
        (COUNTS.clone(), COUNTS, COUNTS.double(), True),
        (COUNTS + torch.tensor([0, 0, 1, 0]), COUNTS, COUNTS.double(), False),
        # One apart, and equal in float64.
        (COUNTS - torch.tensor([0, 0, 0, 1]), COUNTS, COUNTS.double(), False),
        (torch.tensor([True]), torch.tensor([False]), doubles(0.0), False),
        # Another shape, another dtype.
        (ONES.t(), ONES, ONES.double(), False),
        (ONES.double(), ONES, ONES.double(), False),
        (EMPTY, EMPTY, EMPTY.double(), True),
        (0 * ONES, 0 * ONES, 0 * ONES.double(), True),
        (0 * ONES + 1e-30, 0 * ONES, 0 * ONES.double(), False),
        (COMPLEX, COMPLEX, COMPLEX.to(torch.complex128), True),
        (COMPLEX * 1.001, COMPLEX, COMPLEX.to(torch.complex128), False),
    ],
)
def test_results_of_every_kind(ours: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, ok: bool) -> None:
    assert compare(ours, eager, truth).ok is ok


def test_errors_of_integers_and_of_numbers_whose_squares_are_not_representable() -> None:
    row = compare(COUNTS + torch.tensor([0, 0, 1, 0]), COUNTS, COUNTS.double())
    assert (row.error, row.max_error) == (0.25, 1.0)
    assert compare(TINY * 1.5, TINY, TINY).error == pytest.approx(0.5)


# The float64 truth


def lockstep(function: Callable[..., Any], *inputs: torch.Tensor) -> list[Pair]:
    torch.manual_seed(3)
    graph = make_fx(function)(*inputs)
    torch.manual_seed(3)
    return reference_run(graph, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_truth_never_rounds_between_operators(dtype: torch.dtype) -> None:
    x = torch.randn(5, 7).to(dtype)

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * 3.3).softmax(-1).to(torch.float32).sum(0, dtype=torch.float32).to(x.dtype).exp()

    (pair,) = lockstep(f, x)
    assert torch.equal(pair.eager, f(x))
    expected = ((x.double() * 3.3).softmax(-1)).sum(0).exp()
    assert pair.truth.dtype == torch.float64
    torch.testing.assert_close(pair.truth, expected, rtol=1e-14, atol=0)


def test_constants_and_quotients_of_integers_are_of_float64() -> None:
    x, places = torch.randn(5), torch.tensor([0, 2, 2, 1, 0])

    def f(x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums = torch.zeros(3).scatter_add(0, places, x) + torch.linspace(0.1, 1, 3)
        return sums, places / 3, F.nll_loss(x.expand(5, 5), places, weight=torch.full((5,), 0.3))

    sums, thirds, loss = lockstep(f, x, places)
    expected = torch.zeros(3, dtype=torch.float64).scatter_add(0, places, x.double())
    expected += torch.linspace(0.1, 1, 3, dtype=torch.float64)
    torch.testing.assert_close(sums.truth, expected, rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(thirds.truth, places.double() / 3, rtol=1e-15, atol=0)
    torch.testing.assert_close(loss.truth, -x.double()[places].mean(), rtol=1e-14, atol=0)
    assert torch.get_default_dtype() is torch.float32


def test_what_rounding_could_tip_over_is_decided_by_eager() -> None:
    # In bf16 256 + 1 is 256, and float64 would choose the other branch of each of these.
    x = torch.tensor([256.0, 3.0], dtype=torch.bfloat16)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        whole = torch.floor((y - 256) * 0.5)
        return (torch.where(y > 256, y, -y), y.to(torch.int32), whole, torch.sign(y - 256), y.argmax(), y.max(0)[1])

    chosen, integer, whole, sign, where, also = lockstep(f, x)
    torch.testing.assert_close(chosen.truth, doubles(-257.0, -4.0), rtol=0, atol=0)
    assert integer.truth.tolist() == [256, 4]
    assert whole.truth.tolist() == [0.0, -126.0] and sign.truth.tolist() == [0.0, -1.0]
    assert (where.truth.item(), also.truth.item()) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dropout_masks_are_eager_s(dtype: torch.dtype) -> None:
    x = torch.rand(1000).to(dtype) + 0.5
    for draw in (
        lambda x: F.dropout(x, 0.3),
        lambda x: torch.ops.aten.native_dropout(x, 0.3, True)[0],
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)) / 0.7,
    ):
        (pair,) = lockstep(draw, x)
        kept = pair.eager != 0
        assert 600 < kept.sum() < 800
        torch.testing.assert_close(pair.truth, kept * x.double() / 0.7, rtol=1e-12, atol=0)


def test_writes_and_views_are_followed_and_inputs_left_alone() -> None:
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    gapped, expanded, counter = base[:, 1:3], base[:1].expand(2, 4), torch.zeros(2, dtype=torch.int64)

    def f(a: torch.Tensor, b: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a.mul_(0.1)
        a.t()[0].add_(1)
        n.add_(2)
        return a, b.sum(), n

    before = base.clone()
    scaled, total, count = lockstep(f, gapped, expanded, counter)
    # Tracing writes the inputs once; the lockstep run starts from those and writes copies.
    traced = gapped.clone()
    expected = traced.double() * 0.1
    expected[:, 0] += 1
    assert base.equal(torch.cat([before[:, :1], traced, before[:, 3:]], 1))
    torch.testing.assert_close(scaled.truth, expected, rtol=1e-15, atol=0)
    assert total.truth == pytest.approx(expanded.double().sum().item(), abs=1e-15)
    assert count.truth.tolist() == [4, 4] and counter.tolist() == [2, 2]


def test_rms_norm_without_eps_keeps_the_eps_of_its_dtype() -> None:
    x = torch.randn(3, 8) * 1e-4
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten._fused_rms_norm.default, (graph.placeholder("x"), [8], None, None))
    graph.output((graph.call_function(operator.getitem, (node, 0)),))
    (pair,) = reference_run(torch.fx.GraphModule(nn.Module(), graph), [x])
    expected = x.double() * (x.double().square().mean(-1, keepdim=True) + 2.0**-23).rsqrt()
    torch.testing.assert_close(pair.truth, expected, rtol=1e-12, atol=0)


def test_every_discontinuous_row_with_a_floating_result_is_decided_by_eager() -> None:
    table.row_of(torch.ops.aten.exp.default)
    floating = {"floor", "ceil", "trunc", "frac", "round", "sign", "sgn", "fmod", "remainder", "nextafter", "frexp"}
    floating |= {f"fake_quantize_per_{kind}_affine_cachemask" for kind in ("tensor", "channel")}
    for name, row in table.rows().items():
        if row.discontinuous:
            bare = name.removeprefix("aten.").split(".")[0]
            # The others give integers or bools, which eager decides whatever the operator; the values of
            # max and min are continuous, and a cast between floats is what the truth leaves out.
            assert (bare in floating) == (bare in JUMPS), name


# A whole model


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, Any]:
        h = F.dropout(F.gelu(self.norm(self.linear(x))), 0.25, self.training) * self.frozen
        return {"h": h * scale, "loss": [h.square().mean(), h.argmax(-1)]}


def model_and_inputs(dtype: torch.dtype) -> tuple[Model, list[torch.Tensor]]:
    torch.manual_seed(11)
    model = Model().to(dtype)
    return model, [torch.randn(16, 8, dtype=dtype, requires_grad=True), torch.randn(8).to(dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_keeps_the_contract_with_itself(dtype: torch.dtype) -> None:
    model, inputs = model_and_inputs(dtype)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    state = torch.get_rng_state()
    rows = verify(model, model, inputs, seed=5, training=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert all(t.grad is None for t in [*inputs, *model.parameters()])
    assert [(r.direction, r.tensor) for r in rows] == [
        ("fwd", "output['h']"),
        ("fwd", "output['loss'][0]"),
        ("fwd", "output['loss'][1]"),
        *(("fwd", f"norm.{name} after the call") for name in ("running_mean", "running_var", "num_batches_tracked")),
        ("bwd", "input 0"),
        *(("bwd", name) for name in ("linear.weight", "linear.bias", "norm.weight", "norm.bias")),
    ]
    assert all(r.ok and r.error == r.eager_error for r in rows)
    floating = [r for r in rows if r.dtype != "int64" and r.tensor != "linear.bias"]
    assert all(0 < r.error < 8 * torch.finfo(dtype).eps for r in floating)


def test_inference_has_no_gradients_and_no_dropout() -> None:
    model, inputs = model_and_inputs(torch.float32)
    rows = verify(model.eval(), model, inputs, training=False)
    assert [r.direction for r in rows] == ["fwd"] * 3 and all(r.ok for r in rows)


@pytest.mark.parametrize(
    ("wrong", "broken"),
    [
        (lambda x: F.dropout(x, 0.5) * 1.00001 + x, {"output", "input 0"}),
        (lambda x: F.dropout(x.flip(0), 0.5).flip(0) + x, {"output", "input 0"}),
        (lambda x: F.dropout(x, 0.5) + x + (x - x.detach()), {"input 0"}),
        (lambda x: F.dropout(x, 0.5) + x.detach(), {"input 0"}),
        (lambda x: (F.dropout(x, 0.5) + x).double(), {"output"}),
    ],
    ids=["scaled", "another mask", "gradient too large", "gradient missing", "another dtype"],
)
def test_a_wrong_result_is_found(wrong: Callable[..., Any], broken: set[str]) -> None:
    def right(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) + x

    rows = verify(right, wrong, [torch.randn(64, 3, requires_grad=True)], seed=1)
    assert {r.tensor for r in rows if not r.ok} == broken


def test_attention_is_compared_with_attention_written_out() -> None:
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def written(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(16, 16).tril() == 0, -math.inf)
        return scores.softmax(-1) @ v

    rows = verify(fused, written, [q, k, v])
    assert len(rows) == 4 and all(r.ok and r.error < 1e-6 for r in rows)


def test_autocast_and_mutated_inputs() -> None:
    linear = nn.Linear(8, 8)

    def model(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = linear(x)
        seen.add_(1)
        return y.float() * seen

    seen = torch.zeros(8)
    row, after = verify(model, model, [torch.randn(4, 8), seen], training=False)
    assert row.ok and 1e-4 < row.error < 1e-2 and seen.sum() == 0
    assert after.ok and after.tensor == "input 1 after the call"


class Cached(nn.Module):
    """Writes and assigns buffers, and writes an argument, through which a gradient flows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tied = self.linear.weight
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("untouched", torch.ones(3))

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        y = F.linear(self.linear(x), self.tied)
        cache[:2] = y
        with torch.no_grad():
            self.seen.add_(y.sum(0))
            self.mean = self.mean * 0.9 + y.mean() * 0.1
        return y * 2


def _with(change: Callable[[Cached, torch.Tensor, torch.Tensor], object]) -> Callable[[Cached], Callable[..., Any]]:
    def made(model: Cached) -> Callable[..., Any]:
        def call(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            y = model(x, cache)
            with torch.no_grad():
                change(model, x, cache)
            return y

        return call

    return made


def _without_gradient(model: Cached) -> Callable[..., Any]:
    def call(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        other = cache.clone()
        y: torch.Tensor = model(x, other)
        cache.copy_(other.detach())
        return y

    return call


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        (lambda model: model, set()),
        (_with(lambda model, x, cache: model.seen.mul_(1.01)), {"seen after the call"}),
        (_with(lambda model, x, cache: model.seen.zero_()), {"seen after the call"}),
        (_with(lambda model, x, cache: setattr(model, "mean", model.mean + 1)), {"mean after the call"}),
        (_with(lambda model, x, cache: model.untouched.add_(1)), {"untouched after the call"}),
        (_with(lambda model, x, cache: model.linear.bias.add_(1)), {"linear.bias after the call"}),
        (_with(lambda model, x, cache: cache[1:].add_(1)), {"input 1 after the call"}),
        (_with(lambda model, x, cache: x.data.add_(1)), {"input 0 after the call", "tied"}),
        (_without_gradient, {"tied", "linear.bias"}),
    ],
    ids=["right", "scaled", "lost", "assigned", "unwritten", "parameter", "argument", "unwritten argument", "gradient"],
)
def test_what_a_call_wrote_is_compared(change: Callable[[Cached], Callable[..., Any]], broken: set[str]) -> None:
    torch.manual_seed(3)
    model = Cached()
    state = {name: (t, t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    inputs = [torch.randn(2, 4), torch.randn(3, 4)]
    rows = verify(model, change(model), inputs)
    assert {row.tensor for row in rows if not row.ok} == broken
    assert {row.tensor for row in rows} - broken == {
        *("output", "input 1 after the call", "seen after the call", "mean after the call"),
        *("tied", "linear.bias"),
    } - broken
    now = model.state_dict(keep_vars=True)
    assert all(now[name] is tensor and torch.equal(tensor, value) for name, (tensor, value) in state.items())
    assert not any(b.requires_grad for b in model.buffers())


@pytest.mark.parametrize("training", [True, False])
def test_a_recurrent_layer_of_onednn_is_compared_with_float64(training: bool) -> None:
    model, enabled = nn.LSTM(4, 3, batch_first=True), torch.backends.mkldnn.enabled
    rows = verify(model, model, [torch.randn(2, 5, 4)], training=training)
    assert len([row for row in rows if row.direction == "fwd"]) == 3 and all(row.ok for row in rows)
    assert torch.backends.mkldnn.enabled == enabled


@pytest.mark.parametrize(("a", "b"), [((48, 32), (3, 32, 16)), ((16, 48), (48, 32)), ((3, 16, 32), (32, 48))])
def test_products_of_groups_and_their_gradients_are_compared_with_float64(
    a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    ends, bounds = torch.tensor([16, 16, 48], dtype=torch.int32), ((0, 16), (16, 16), (16, 48))

    def grouped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(x, y, ends)

    def looped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.dim() == y.dim():
            return torch.stack([x[:, s:e] @ y[s:e] for s, e in bounds])
        return torch.cat(
            [x[s:e] @ y[g] if x.dim() == 2 else x[g] @ y[:, s:e] for g, (s, e) in enumerate(bounds)],
            -2 if x.dim() == 2 else -1,
        )

    operands = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in (a, b)]
    rows = verify(grouped, grouped, operands)
    assert all(row.ok and row.error == row.eager_error < 0.01 for row in rows)
    assert not all(row.ok for row in verify(grouped, lambda x, y: looped(x * 1.1, y), operands))
    assert {row.tensor for row in rows} == {"output", "input 0", "input 1"}


def test_functions_that_an_operator_traces_itself() -> None:
    """FlexAttention's gradient, which PyTorch has no other way to call on a CPU."""
    blocks: Any = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu")

    def cap(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return 2 * torch.tanh(score / 2)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.higher_order.flex_attention(q, k, v, cap, blocks.as_tuple(), 0.3, {}, (), ())[0]
        return out

    def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = 2 * torch.tanh(q @ k.mT * 0.15)
        return scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf).softmax(-1) @ v

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 8, generator=generator, requires_grad=True) for _ in range(3))
    rows = verify(attend, written_out, [q, k, v])
    assert len(rows) == 4 and all(row.ok and row.eager_error for row in rows)


# Results whose error is a matter of luck


def two_layers(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(torch.sin(F.linear(x, w)), w.mT)


def two_layers_kept_wide(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The first product is rounded once, after the sine."""
    narrow, wide = w.bfloat16(), w.bfloat16().float()
    return F.linear(torch.sin(F.linear(x.bfloat16().float(), wide)).bfloat16(), narrow.mT)


def norm_of_two(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (2,))


def norm_of_two_written_out(x: torch.Tensor) -> torch.Tensor:
    half = (x[:, 0] - x[:, 1]) / 2
    ratio = half / (half * half + 1e-5).sqrt()
    return torch.stack([ratio, -ratio], -1)


PARTLY_WIDE = {
    "float64, its own truth": (norm_of_two, norm_of_two_written_out, [(3, 2)], torch.float64),
    "fp32 after bf16": (two_layers, two_layers_kept_wide, [(2, 3), (2, 3)], torch.float32),
    "float64 after fp32": (
        lambda x: x.exp().double().sum(),
        lambda x: (x.exp() * (1 + 2**-23)).double().sum(),
        [(2, 1)],
        torch.float32,
    ),
}


@pytest.mark.parametrize("case", PARTLY_WIDE)
@pytest.mark.parametrize("seed", [15, 27])
def test_rounding_alone_breaks_no_bound(case: str, seed: int) -> None:
    right, near, shapes, dtype = PARTLY_WIDE[case]
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    assert [row for row in verify(right, near, inputs) if not row.ok] == []
    eps = torch.finfo(torch.bfloat16 if "bf16" in case else torch.float64 if case.endswith("truth") else dtype).eps

    def wrong(*tensors: torch.Tensor) -> torch.Tensor:
        return near(*tensors) * (1 + 64 * eps)

    assert [row for row in verify(right, wrong, inputs) if not row.ok] != []


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.binary_cross_entropy(x.abs(), x.abs()),
        lambda x: F.binary_cross_entropy(torch.sigmoid(40 * x.abs()), x.abs()),
        lambda x: torch.acos(x) + torch.atanh(x / 2),
        lambda x: torch.bernoulli(x.abs()) * x,
    ],
)
def test_probabilities_of_one_are_still_judged(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = doubles(1.0, -1.0, 1.0, 0.0)
    assert [row.ok for row in verify(function, lambda x: function(x) + 0.001, [x])] == [False]


def test_a_complex_dtype_that_the_program_names_is_widened() -> None:
    x = COMPLEX.expand(5).clone()
    rows = verify(lambda x: torch.linalg.vector_norm(x * x, dtype=x.dtype), lambda x: (x * x).abs().norm(), [x])
    assert [row.ok for row in rows] == [True]
