"""Compiled models on tilewright's attention kernels in Triton's interpreter, against float64 and eager."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.contract import nodes, recorded, targets
from tests.passes.attention.spellings import DROPPED_ROW, MASKS, SPELLINGS, Function
from tests.passes.attention.test_recognise import check_numbers, heads, value_and_gradients, with_gradients
from tilewright import functional
from tilewright.graph import constants
from tilewright.kernels.offer import THEIRS
from tilewright.passes.attention.library import ON_CPU as ON_CPU_PEER
from tilewright.passes.attention.library import OWN
from tilewright.records.outcomes import Outcome
from tilewright.records.program import Decision

pytestmark = pytest.mark.usefixtures("in_triton")
BF16, FP16 = torch.bfloat16, torch.float16


class Compiled:
    """A function under the backend, and what its compilations learned."""

    def __init__(self, fn: Callable[..., Tensor], dynamic: bool = False) -> None:
        self.call, self.record = recorded(fn, dynamic=dynamic)

    @property
    def choices(self) -> list[Decision]:
        """The decisions on whose kernel an attention is."""
        return [d for d in self.record.decisions if d.passed_by == "attention" and "N² tensor" not in d.reason]

    def targets(self, name: str) -> int:
        return sum(name in target for target in targets(self.record))

    @property
    def attention(self) -> torch.fx.Node:
        """The only call of tilewright's attention."""
        (call,) = (node for node in nodes(self.record) if node.target is torch.ops.tilewright.attention.default)
        return call

    def check_taken(self, training: bool = True) -> None:
        (choice,) = self.choices
        assert choice.verdict == "taken" and "portable Triton" in choice.reason, choice
        assert self.targets("tilewright.attention.default") == 1
        assert self.targets("tilewright.attention_backward.default") == training
        assert self.targets("scaled_dot_product") == 0


def trained(fn: Function, inputs: Sequence[Tensor], truth: Function | None = None) -> Compiled:
    """Forward and backward keep the numbers contract, and the result lies as eager's."""
    compiled = Compiled(fn)
    actual, eager = value_and_gradients(compiled.call, inputs), value_and_gradients(fn, inputs)
    check_numbers(actual, eager, value_and_gradients(truth or fn, inputs, torch.float64))
    assert actual[0].stride() == eager[0].stride()
    return compiled


def inferred(fn: Function, inputs: Sequence[Tensor]) -> Compiled:
    """As `trained`, without gradients."""
    with torch.no_grad():
        return trained(fn, [x.detach() for x in inputs])


def check(fn: Function, inputs: Sequence[Tensor], truth: Function | None = None) -> Compiled:
    """As `trained`, on tilewright's kernels; a backward only where an input wants its gradient."""
    compiled = trained(fn, inputs, truth)
    compiled.check_taken(training=any(x.requires_grad for x in inputs))
    return compiled


@pytest.mark.parametrize("name", ["five axes", "three axes"])
def test_attention_written_out(name: str) -> None:
    check(SPELLINGS[name], with_gradients(heads()))


@pytest.mark.parametrize(("name", "mask"), MASKS[1::12], ids=str)
def test_masks_written_out_and_the_rows_they_empty(name: str, mask: Tensor) -> None:
    """NaN stays where eager has it, and nowhere else: `check_numbers` compares the places."""
    check(SPELLINGS[name], [*with_gradients(heads()), mask])


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


def heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Laid out as a linear layer gives them, and merged as one takes them."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=0.3).transpose(1, 2).flatten(2)


def with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize(("fn", "sizes"), [(causal, (33, 20)), (heads_last, (33, 20)), (grouped, (1, 1))])
def test_attention_called(fn: Function, sizes: tuple[int, int]) -> None:
    check(fn, with_gradients(heads(n=sizes[0], m=sizes[1], d=16)))


@pytest.mark.parametrize("mask", [torch.rand(33, 20) > 0.3, torch.randn(2, 1, 1, 20)], ids=lambda mask: str(mask.shape))
def test_masks_given(mask: Tensor) -> None:
    check(with_mask, [*with_gradients(heads(n=33, m=20, d=16)), mask])


@pytest.mark.parametrize(
    ("name", "truth", "dtype"), [("causal tril", "causal tril", FP16), ("softmax in fp32", "plain", BF16)]
)
def test_narrow_dtypes(name: str, truth: str, dtype: torch.dtype) -> None:
    check(SPELLINGS[name], with_gradients(heads(dtype)), SPELLINGS[truth])


def test_autocast() -> None:
    check(SPELLINGS["in autocast"], with_gradients(heads()), SPELLINGS["plain"])


def test_expanded_keys_stay_with_pytorch() -> None:
    (choice,) = trained(SPELLINGS["grouped broadcast"], with_gradients(heads())).choices
    assert choice.verdict == "refused" and "an expanded operand" in choice.reason


def test_later_calls_and_operands_that_begin_elsewhere_give_the_same() -> None:
    """The plan of the first call is reused, except for operands that do not begin at a multiple of 16."""
    compiled = Compiled(heads_last)
    inputs = with_gradients(heads(torch.bfloat16, d=16))
    first, second = (value_and_gradients(compiled.call, inputs) for _ in range(2))
    shifted = [torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x.detach()) for x in inputs]
    assert all(x.data_ptr() % 16 for x in shifted)
    compiled = Compiled(causal)
    expected = value_and_gradients(compiled.call, inputs)
    leaves = [x.requires_grad_() for x in shifted]
    out = compiled.call(*leaves)
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)
    third = [out.detach(), *torch.autograd.grad(out, leaves, cotangent)]
    for one, other in (*zip(first, second, strict=True), *zip(expected, third, strict=True)):
        assert torch.equal(one, other)


def test_a_module_that_calls_attention_out_of_dynamos_sight() -> None:
    module = nn.MultiheadAttention(32, 2, batch_first=True)
    compiled = Compiled(lambda x: module(x, x, x, need_weights=False)[0])
    x = torch.randn(2, 9, 32, requires_grad=True)
    (ours,), (theirs,) = (torch.autograd.grad(f(x).square().sum(), x) for f in (compiled.call, compiled_away(module)))
    compiled.check_taken()
    torch.testing.assert_close(ours, theirs)


def compiled_away(module: nn.MultiheadAttention) -> Callable[[Tensor], Tensor]:
    return lambda x: module(x, x, x, need_weights=False)[0]


def test_sizes_that_vary() -> None:
    compiled = Compiled(causal, dynamic=True)
    for n in (7, 12, 31):
        inputs = with_gradients(heads(n=n, m=n, d=16))
        actual, eager = value_and_gradients(compiled.call, inputs), value_and_gradients(causal, inputs)
        check_numbers(actual, eager, value_and_gradients(causal, inputs, torch.float64))
    assert [choice.verdict for choice in compiled.choices] == ["taken"]


ON_CPU = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    ("times", "least", "kernels"),
    [
        ((55.0, 55.0), 105.0, (ON_CPU, f"{ON_CPU}_backward")),
        ((40.0, 60.0), 90.0, ("tilewright.attention", f"{ON_CPU}_backward")),
        ((60.0, 40.0), 90.0, (ON_CPU, "tilewright.attention_backward")),
    ],
)
def test_races_decide_on_forward_and_backward(
    times: tuple[float, float], least: float, kernels: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is raced against 50 µs; in 16 bits different kernels share the log-sum-exp, as the numbers show."""

    class Raced:
        def __init__(self, us: float) -> None:
            self.us = us

        def outcome(self, measure: bool) -> Outcome:
            return Outcome({THEIRS: 50.0, OWN.name: self.us})

    monkeypatch.setattr("tilewright.choose.attention.attention_races", lambda *_: tuple(map(Raced, times)))
    monkeypatch.setattr("tilewright.choose.attention._libraries", lambda *_: [ON_CPU_PEER])
    compiled = trained(causal, with_gradients(heads(torch.bfloat16)))
    (choice,) = compiled.choices
    assert choice.verdict == ("tried and lost" if least > 100.0 else "taken")
    assert choice.reason.endswith(f"{least:.1f} µs measured forward and backward, 100.0 µs otherwise")
    # Beside the prediction, which is of the forward.
    assert choice.measured_us is None
    assert [name for name in targets(compiled.record) if "attention" in name] == [
        f"{name}.default" if "." in name else f"aten.{name}.default" for name in kernels
    ]


def test_what_the_user_switched_off_is_not_replaced() -> None:
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    try:
        compiled = Compiled(causal)
        compiled.call(*heads(d=16))
    finally:
        torch.backends.cuda.enable_mem_efficient_sdp(True)
    (choice,) = compiled.choices
    assert choice.verdict == "refused" and "the user chose" in choice.reason


def test_what_the_user_gave_to_one_kernel_stays_with_it() -> None:
    def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            first = causal(q, k, v)
        return causal(first, k, v)

    compiled = Compiled(both)
    inputs = heads(d=16)
    torch.testing.assert_close(compiled.call(*inputs), both(*inputs))
    assert [choice.verdict for choice in compiled.choices] == ["refused", "taken"]


def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = functional.attention(q, k, v, causal=True)
    return out.square()


def test_a_model_that_calls_the_function_itself() -> None:
    inputs = with_gradients(heads(d=16))
    call = torch.compile(own, backend="tilewright", fullgraph=True)
    actual, eager = value_and_gradients(call, inputs), value_and_gradients(own, inputs)
    for mine, plainly in zip(actual, eager, strict=True):
        torch.testing.assert_close(mine, plainly)


def test_rows_that_see_nothing_are_zeros_where_attention_is_called() -> None:
    """As PyTorch's fused kernels have it."""
    compiled = Compiled(with_mask)
    out = compiled.call(*heads(d=16), ~DROPPED_ROW)
    compiled.check_taken(training=False)
    assert torch.equal(out[:, :, 3], torch.zeros_like(out[:, :, 3])) and out.isfinite().all()


def columns(size: int) -> Tensor:
    return torch.arange(size)[None, None, None, :]


def rows(size: int) -> Tensor:
    return torch.arange(size)[None, None, :, None]


LOWEST = torch.finfo(torch.float32).min
Masking = Callable[[int, int], Tensor]
"""(queries, keys) → mask."""
BANDS: dict[str, tuple[Masking, tuple[int, int], tuple[int | None, int | None]]] = {
    # Each query sees itself and the 7 keys before it, as Mistral and Gemma build it.
    "window": (lambda n, m: (columns(m) <= rows(n)) & (columns(m) > rows(n) - 8), (33, 33), (7, 0)),
    "causal from the start": (lambda n, m: torch.where(columns(m) <= rows(n), 0.0, -torch.inf), (20, 33), (None, -13)),
    "causal to the end": (lambda n, m: columns(m) <= rows(n) + m - n, (20, 33), (None, 0)),
    "rows without keys": (lambda n, m: columns(m) <= rows(n) + m - n, (33, 20), (None, 0)),
    "turned around": (lambda n, m: ~(rows(n) + m - n < columns(m)), (20, 33), (None, 0)),
    "distance": (lambda n, m: (columns(m) - rows(n) - (m - n)).abs() <= 2, (20, 33), (2, 2)),
    "masked_fill": (
        lambda n, m: torch.zeros(1, 1, n, m).masked_fill(columns(m) > rows(n) + m - n, -torch.inf),
        *((20, 33), (None, 0)),
    ),
    "(1 - m) * min": (lambda n, m: (1 - (columns(m) <= rows(n) + m - n).float()) * LOWEST, *((20, 33), (None, 0))),
}
TRAINED = ("window", "rows without keys")
COMPUTED = ("window", "rows without keys", "distance", "(1 - m) * min")
COMPARED = ("window", "causal from the start", "causal to the end", "turned around", "masked_fill")
NO_BANDS: dict[str, Masking] = {
    "a hole": lambda n, m: (columns(m) <= rows(n)) & ((columns(m) != 1) | (rows(n) != 5)),
    "each entry its own": lambda n, m: columns(m) <= rows(n) + torch.arange(2)[:, None, None, None],
    "the other diagonal": lambda n, m: columns(m) + rows(n) < n,
}


def masked(mask: Masking) -> Function:
    """Attention under a mask that the graph builds, expanded over the batch."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = mask(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, made.expand(len(q), 1, q.shape[2], k.shape[2]))

    return function


@pytest.mark.parametrize(
    ("name", "computed"), [*((name, True) for name in COMPUTED), *((name, False) for name in COMPARED)]
)
def test_a_band_is_no_mask(name: str, computed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is too large to be computed: then only places, Q or K of them, may be."""
    mask, sizes, band = BANDS[name]
    if not computed:
        monkeypatch.setattr(constants, "MOST_BYTES", 8 * 33)
    compiled = check(masked(mask), with_gradients(heads(n=sizes[0], m=sizes[1], d=16), 3 if name in TRAINED else 0))
    assert options_of(compiled) == (None, band)
    assert compiled.targets("where") == compiled.targets("le.") == 0


@pytest.mark.parametrize("name", NO_BANDS)
def test_other_masks_stay_masks(name: str) -> None:
    kept, _ = options_of(check(masked(NO_BANDS[name]), heads(n=20, m=20, d=16)))
    assert kept is not None


def options_of(compiled: Compiled) -> tuple[torch.fx.Node | None, tuple[int | None, int | None]]:
    """The mask of the only attention, and its window."""
    return compiled.attention.args[3], tuple(compiled.attention.args[8:10])


def padded(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    seen = (columns(33) <= rows(33)) & (torch.arange(33) < lengths[:, None])[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, seen)


def test_a_band_beside_padding() -> None:
    compiled = check(padded, [*with_gradients(heads(n=33, m=33, d=16)), torch.tensor([33, 20])])
    mask, window = options_of(compiled)
    assert window == (None, 0) and mask is not None
    assert mask.meta["val"].stride()[1:3] == (0, 0) and mask.meta["val"].dtype == torch.bool


def biased(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    bias = torch.where(columns(33) <= rows(33), table.permute(2, 0, 1)[None], -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, bias)


def test_a_bias_is_read_through_its_strides() -> None:
    inputs = [*with_gradients(heads(n=33, m=33, d=16)), torch.randn(33, 33, 3)]
    compiled = check(biased, inputs)
    mask, window = options_of(compiled)
    assert window == (None, 0) and mask is not None
    assert mask.meta["val"].stride() == (0, 1, 99, 3)


@pytest.mark.parametrize(("position", "dtype"), [(0, BF16), (70, FP16)])
def test_a_token_against_a_static_cache(position: int, dtype: torch.dtype) -> None:
    """Places behind the token, and every fifth, are hidden by a mask that all heads share; the keys are split."""

    def decode(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        seen = ((columns(128) <= position) & (columns(128) % 5 != 1)).expand(len(q), 1, 1, 128)
        return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)

    torch.manual_seed(0)
    shapes = (2, 8, 1, 64), (2, 2, 128, 64), (2, 2, 128, 64)
    inputs = [*(torch.randn(shape, dtype=dtype) for shape in shapes), torch.tensor(position)]
    compiled = inferred(decode, inputs)
    (choice,) = compiled.choices
    assert choice.verdict == "taken" and "split over the keys" in choice.reason
    mask, window = options_of(compiled)
    assert window == (None, None) and mask is not None and mask.meta["val"].stride()[:2] == (0, 0)
