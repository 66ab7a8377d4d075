"""The attention kernels in Triton's interpreter: every option against float64, at sizes that cross blocks."""

import pytest
import torch

from tests.kernels.attention.calls import Call, wrong, wrong_packed
from tilewright.kernels.attention import attention, reference

CPU = torch.device("cpu")
CALLS = [
    Call(),
    Call(dtype=torch.float32, value_size=24, layout="positions"),
    Call(dtype=torch.float16, head_size=40, queries=1, keys=1),
    Call(dtype=torch.float32, head_size=5, heads=4, kv_heads=1, layout="misaligned", options={"causal": True}),
    Call(queries=17, keys=53, layout="last", options={"causal": True}),
    Call(queries=70, keys=37, options={"causal": True}),
    Call(queries=41, keys=47, dtype=torch.float32, options={"window": (9, 3)}),
    Call(queries=47, keys=41, dtype=torch.float32, options={"window": (9, None), "causal": True}),
    Call(queries=41, keys=47, dtype=torch.float32, options={"window": (20, -3), "scale": -0.3}),
    Call(dtype=torch.float32, options={"softcap": 1.5, "scale": 0.5}),
    Call(batch=2, dtype=torch.float32, slopes=True, options={"causal": True}),
    Call(heads=4, mask="boolean"),
    Call(batch=2, dtype=torch.float32, mask="keys", options={"causal": True}),
    Call(dtype=torch.float32, mask="rows"),
    Call(dtype=torch.float32, mask="additive", slopes=True, options={"softcap": 2.0}),
    Call(batch=2, queries=19, keys=21, dtype=torch.float32, options={"dropout_p": 0.3}),
    Call(queries=5, keys=7, dtype=torch.float32, options={"dropout_p": 1.0}),
    Call(queries=70, keys=90, dtype=torch.float32, outliers=True),
    Call(dtype=torch.float32, options={"scale": 0.0}),
    Call(heads=8, kv_heads=2, queries=1, keys=131, value_size=40),
    Call(heads=6, kv_heads=2, queries=3, keys=130, dtype=torch.float16, options={"causal": True}),
    Call(heads=4, queries=2, keys=200, slopes=True, mask="additive", options={"softcap": 3.0, "window": (70, None)}),
    Call(queries=3, keys=100, mask="rows", layout="positions", options={"window": (0, -90)}),
    Call(queries=37, keys=21, head_size=130, heads=1, kv_heads=1, value_size=20, options={"causal": True}),
    Call(queries=3, keys=70, outliers=True, options={"window": (0, 0), "softcap": 1.5, "scale": -0.3}),
    Call(queries=17, keys=3, dtype=torch.float32, outliers=True, options={"softcap": 3.0, "scale": 1.0}),
    Call(queries=0),
    Call(keys=0, dtype=torch.float32),
    Call(batch=0),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_numbers_contract(call: Call) -> None:
    assert wrong(call, CPU) == []


def test_operands_may_begin_anywhere_and_gradients_be_sums() -> None:
    tensors, _ = Call(dtype=torch.float32, head_size=5, layout="misaligned").inputs(CPU)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    (out, lse), (true_out, true_lse) = attention(*tensors, return_lse=True), reference.attention(*wide)
    mine = torch.autograd.grad(out.sum() + lse.square().sum(), tensors)
    true = torch.autograd.grad(true_out.sum() + true_lse.square().sum(), wide)
    for ours, right in zip((out, lse, *mine), (true_out, true_lse, *true), strict=True):
        torch.testing.assert_close(ours, right.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("seed", "sizes", "dtype"),
    [(2, (64, 64), torch.float16), (4, (192, 16), torch.bfloat16), (11, (64, 64), torch.bfloat16)],
    ids=str,
)
def test_weights_of_nearly_one_have_gradients_of_nearly_zero(
    seed: int, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    widths = {"head_size": sizes[0], "value_size": sizes[1]}
    call = Call(heads=4, queries=1, keys=3, dtype=dtype, outliers=True, options={"causal": True}, **widths)
    assert wrong(call, CPU, seed) == []


def test_the_gradient_of_one_query_among_many_keys_is_small_where_one_weight_is_nearly_one() -> None:
    call = Call(queries=1, keys=113, head_size=128, slopes=True, outliers=True, options={"dropout_p": 0.1})
    assert wrong(call, CPU, 25) == []


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (3, 5)}], ids=str)
def test_packed_sequences_are_each_their_own(options: dict[str, object]) -> None:
    assert wrong_packed(([5, 0, 33, 1, 17], [7, 3, 20, 0, 40]), (16, 24), torch.float32, CPU, **options) == []


def test_the_gradient_of_the_log_sum_exp_alone() -> None:
    tensors, _ = Call(dtype=torch.float32).inputs(CPU)
    alone = torch.autograd.grad(attention(*tensors, return_lse=True)[1].sum(), tensors[:2])
    assert all(x.isfinite().all() for x in alone)


def test_two_calls_of_a_kind_give_the_same() -> None:
    tensors, options = Call(heads=4, layout="positions", options={"causal": True}).inputs(CPU)
    results = []
    for _ in range(2):
        out, lse = attention(*tensors, return_lse=True, **options)
        results.append([out, lse, *torch.autograd.grad(out.float().sum() + lse.sum(), tensors)])
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))
    assert results[1][0].stride() == results[0][0].stride() == tensors[0].stride()
    shifted = torch.empty(tensors[0].numel() + 1, dtype=torch.bfloat16)[1:].as_strided(
        tensors[0].shape, tensors[0].stride(), 1
    )
    with torch.no_grad():
        assert torch.equal(attention(shifted.copy_(tensors[0]), *tensors[1:], **options), results[0][0])


def test_a_second_derivative_is_refused_not_left_out() -> None:
    tensors, _ = Call(dtype=torch.bfloat16).inputs(CPU)
    for options in ({}, {}, {"alibi_slopes": torch.ones(2)}):
        (dq,) = torch.autograd.grad(attention(*tensors, **options).sum(), tensors[0], create_graph=True)
        with pytest.raises(NotImplementedError, match="attention_backward has no second derivative"):
            dq.sum().backward()


@pytest.mark.parametrize(("place", "value"), [("q", float("inf")), ("k", float("nan")), ("v", float("inf"))], ids=str)
def test_nan_and_infinity_reach_what_they_reach_in_eager(place: str, value: float) -> None:
    tensors, _ = Call(dtype=torch.float32).inputs(CPU)
    tensors = [x.detach() for x in tensors]
    tensors["qkv".index(place)][0, 1, 20, 3] = value
    out, true = attention(*tensors), reference.attention(*tensors)[0]
    assert torch.equal(out.isnan(), true.isnan())
    assert torch.equal(out.isinf(), true.isinf())


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_operators_are_registered_well(dropout: float) -> None:
    (q, k, v), _ = Call(dtype=torch.float32, layout="positions", queries=5, keys=9).inputs(CPU)
    options = (None, None, None, None, 0.25, None, 0, 0.0, dropout, 0, 0, False, "auto")
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    # Each of the checks draws anew, so that with dropout only shapes can be compared.
    checks = tests if dropout == 0.0 else tests[:2]
    torch.library.opcheck(torch.ops.tilewright.attention.default, (q, k, v, *options), test_utils=checks)
    out, lse, level, state = torch.ops.tilewright.attention.default(q.detach(), k.detach(), v.detach(), *options)
    given = (torch.randn_like(out), None, q.detach(), k.detach(), v.detach(), out, lse, level, state, *options)
    torch.library.opcheck(torch.ops.tilewright.attention_backward.default, given, test_utils=tests)


def test_compiled_as_one_graph() -> None:
    tensors, _ = Call(dtype=torch.float32, layout="positions").inputs(CPU)
    results = []
    for function in (attention, torch.compile(attention, backend="aot_eager", fullgraph=True)):
        out = function(*tensors, causal=True)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for plain, compiled in zip(*results, strict=True):
        assert torch.equal(plain, compiled)
        assert plain.stride() == compiled.stride()


def test_dropout_follows_from_the_state_of_the_generator() -> None:
    tensors, _ = Call(dtype=torch.float32).inputs(CPU)
    torch.manual_seed(3)
    first, second = (attention(*tensors, dropout_p=0.4) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(attention(*tensors, dropout_p=0.4), first)
    assert not torch.equal(first, second)
