"""Attention without a GPU: what PyTorch's operators compute, and what is refused."""

import itertools
from typing import Any

import pytest
import torch

from tests.contract import broken
from tests.kernels.attention.calls import Call, wrong_packed
from tilewright.bench.catalogue import suite
from tilewright.bench.suites import attention as suites
from tilewright.hardware.architectures import stated_limits
from tilewright.kernels.attention import attention, reference
from tilewright.kernels.attention.decode.triton import _splits
from tilewright.kernels.attention.dispatch import empty_gradient, strides_like, with_aligned_rows

CPU = torch.device("cpu")
CALLS = [
    Call(dtype=torch.float64),
    Call(dtype=torch.float64, heads=4, kv_heads=1, value_size=24, options={"causal": True}),
    Call(dtype=torch.float64, queries=70, keys=37, options={"causal": True}),
    Call(dtype=torch.float64, options={"window": (9, 3), "softcap": 1.5}),
    Call(dtype=torch.float64, batch=2, mask="boolean", slopes=True),
    Call(dtype=torch.float64, mask="rows"),
    Call(dtype=torch.float64, queries=50, options={"causal": True}),
    Call(dtype=torch.float64, queries=50, options={"causal": True, "scale": 0.0}),
    Call(dtype=torch.float64, queries=50, options={"causal": True, "scale": -0.3}),
    Call(dtype=torch.float64, head_size=300),
    Call(dtype=torch.float64, queries=0),
    Call(dtype=torch.float64, keys=0),
]


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_pytorch_computes_what_no_kernel_takes(call: Call) -> None:
    tensors, options = call.inputs(CPU)
    true, true_lse = reference.attention(*tensors, **options)
    dout = torch.randn_like(true)
    for with_lse in (False, True):
        found = attention(*tensors, return_lse=with_lse, **options)
        out = found[0] if with_lse else found
        torch.testing.assert_close(out, true)
        if with_lse:
            torch.testing.assert_close(found[1], true_lse)
        gradients = [torch.autograd.grad(result, tensors, dout, retain_graph=True) for result in (out, true)]
        torch.testing.assert_close(*gradients)


def test_the_formula_is_softmax() -> None:
    (q, k, v), _ = Call(dtype=torch.float64, heads=4, kv_heads=2).inputs(CPU)
    out, lse = reference.attention(q, k, v)
    scores = torch.einsum("bkgid,bkjd->bkgij", q.unflatten(1, (2, 2)), k).flatten(1, 2) / 4
    torch.testing.assert_close(lse, scores.exp().sum(-1).log())
    torch.testing.assert_close(out, torch.softmax(scores, -1) @ v.repeat_interleave(2, 1))


def test_a_query_that_sees_no_key_gives_zeros_and_no_gradient() -> None:
    tensors, _ = Call(dtype=torch.float64, queries=9, keys=4).inputs(CPU)
    out, lse = attention(*tensors, causal=True, return_lse=True)
    assert (out[:, :, :5] == 0).all()
    assert (lse[:, :, :5] == -torch.inf).all()
    assert lse[:, :, 5:].isfinite().all()
    gradients = torch.autograd.grad(out.sum(), tensors)
    assert all(x.isfinite().all() for x in gradients)
    assert (gradients[0][:, :, :5] == 0).all()


def test_one_key_has_a_weight_of_one_whatever_the_score() -> None:
    tensors, _ = Call(dtype=torch.bfloat16, keys=1, heads=4, outliers=True).inputs(CPU)
    dq, dk, _ = torch.autograd.grad(attention(*tensors).float().square().sum(), tensors)
    assert not dq.any() and not dk.any()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 5)}], ids=str)
def test_packed_sequences_are_each_their_own(options: dict[str, Any]) -> None:
    assert wrong_packed(([5, 0, 33, 1], [7, 3, 20, 40]), (8, 12), torch.float32, CPU, **options) == []


def test_additive_masks_and_slopes_have_a_gradient() -> None:
    (q, k, v), options = Call(dtype=torch.float64, mask="additive", slopes=True).inputs(CPU)
    mask, slopes = options["mask"].requires_grad_(), options["alibi_slopes"].double().requires_grad_()
    found = torch.autograd.grad(attention(q, k, v, mask=mask, alibi_slopes=slopes).sum(), (mask, slopes))
    true = torch.autograd.grad(reference.attention(q, k, v, mask=mask, alibi_slopes=slopes)[0].sum(), (mask, slopes))
    torch.testing.assert_close(found, true)


def test_dropout_keeps_the_expected_share_and_scale() -> None:
    q, k, v = torch.zeros(1, 1, 400, 8), torch.zeros(1, 1, 500, 8), torch.ones(1, 1, 500, 8)
    out, _ = attention(q, k, v, dropout_p=0.25, return_lse=True)
    assert abs(out.mean().item() - 1.0) < 0.01
    assert out.std().item() > 0.01


def test_shapes_are_known_without_memory() -> None:
    q, k = torch.empty(2, 4, 5, 16, device="meta"), torch.empty(2, 2, 7, 16, device="meta")
    out, lse = attention(q, k, k, return_lse=True)
    assert (out.shape, out.device.type, lse.shape) == (q.shape, "meta", q.shape[:3])


@pytest.mark.parametrize("heads", [2, 4])
def test_sizes_may_be_dynamic(heads: int) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return attention(q, k, v, causal=True)

    fast = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (9, 5, 1):
        q, (k, v) = torch.randn(2, 4, length, 8), torch.randn(2, 2, heads, length, 8)
        torch.testing.assert_close(fast(q, k, v), call(q, k, v))


def test_autocast_sets_the_dtype() -> None:
    (q, k, v), _ = Call(dtype=torch.float32).inputs(CPU)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, k, v).dtype == torch.bfloat16
    assert attention(q, k, v).dtype == torch.float32


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = (torch.randn(1, 4, 6, 8) for _ in range(3))
    starts = torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"a mask that is bool or floating-point, not torch\.int64"):
        attention(q, k, v, mask=torch.ones(6, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match="mask on the device of q, cpu, not on meta"):
        attention(q, k, v, mask=torch.ones(6, 6, device="meta"))
    with pytest.raises(TypeError, match=r"floating-point tensors, not torch\.int64"):
        attention(q.long(), k.long(), v.long())
    with pytest.raises(ValueError, match=r"H a multiple of Hk, not \(1, 4, 6, 8\), \(1, 3, 6, 8\)"):
        attention(q, k[:, :3], v[:, :3])
    with pytest.raises(ValueError, match=r"q \[B, H, Sq, D\], .*\(1, 4, 6, 7\)"):
        attention(q[..., :7], k, v)
    with pytest.raises(ValueError, match=r"one dtype on one device, not torch\.float32 .*torch\.float16"):
        attention(q, k.half(), v)
    with pytest.raises(ValueError, match=r"mask broadcastable to \(1, 4, 6, 6\), not \(5, 6\)"):
        attention(q, k, v, mask=torch.ones(5, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"dropout_p in \[0, 1\]"):
        attention(q, k, v, dropout_p=1.5)
    with pytest.raises(ValueError, match=r"packed attention takes .*not q .* with one of them"):
        attention(q[0], k[0], v[0], cu_seqlens_q=starts)
    with pytest.raises(ValueError, match=r"packed attention takes .*a mask"):
        attention(q[0], k[0], v[0], cu_seqlens_q=starts, cu_seqlens_k=starts, mask=torch.ones(6, 6))


def test_where_packed_sequences_begin_must_fit() -> None:
    q, k, v = (torch.randn(6, 4, 8) for _ in range(3))
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    apart = torch.tensor([0, 9, 2, 9, 6], dtype=torch.int32)[::2]
    given = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    assert torch.equal(attention(q, k, v, cu_seqlens_q=apart, cu_seqlens_k=starts.long()), attention(q, k, v, **given))
    for wrong in (starts[:2], starts[:1], starts[None], starts.float(), starts.to("meta")):
        with pytest.raises(ValueError, match=r"cu_seqlens_q and cu_seqlens_k int32 \[N \+ 1\] on cpu, not"):
            attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=wrong)
    for places in ([0, 2, 5], [1, 2, 6], [0, 7, 6]):
        with pytest.raises(ValueError, match=r"cu_seqlens_k that rise from 0 to 6, not \["):
            attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=torch.tensor(places))


def test_copies_keep_the_order_of_axes_and_begin_rows_at_16_bytes() -> None:
    x = torch.randn(2, 5, 3, 20).transpose(1, 2).to(torch.bfloat16)
    copy = with_aligned_rows(x)
    assert torch.equal(copy, x)
    assert copy.stride() == (5 * 3 * 24, 24, 3 * 24, 1)
    assert with_aligned_rows(copy) is copy
    assert strides_like(x, 20)[1] == x.stride()
    assert with_aligned_rows(torch.randn(2, 3, 8, 5).mT).stride(3) == 1


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_gradients_of_a_copy_lie_as_those_of_the_operand(order: tuple[int, ...], heads: int) -> None:
    """Heads that are one expanded, rows that begin between 16 bytes."""
    dense = torch.randn(*(((2, 1, 7)[axis]) for axis in order), 5)
    x = dense.permute(*(order.index(axis) for axis in range(3)), 3).expand(2, heads, 7, 5)
    ours, copied = empty_gradient(x), empty_gradient(with_aligned_rows(x))
    assert ours.shape == copied.shape == x.shape
    assert [s for s, n in zip(ours.stride(), x.shape, strict=True) if n > 1] == [
        s for s, n in zip(copied.stride(), x.shape, strict=True) if n > 1
    ]


@pytest.mark.parametrize("causal", [0, 1])
def test_the_suites_keep_the_contract(causal: int) -> None:
    one = suite("attention")
    inputs = one.workload((16, 8192, causal), "float32").make(CPU, torch.Generator().manual_seed(0))
    small = tuple(x.detach()[:, :3, :37].contiguous().requires_grad_() if x is not causal else x for x in inputs[:3])
    function = one.variant("tilewright").function
    assert broken(one, (*small, bool(causal)), function) == []


def test_a_bench_is_told_why_the_kernels_for_hopper_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.kernels.attention import dispatch

    one = suite("attention")
    refuses = one.variant("tilewright-hopper").refuses
    assert torch.cuda.is_available() or refuses(one.workload((64, 512, 1), "bfloat16")) == "there is no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dispatch, "limits_of", lambda _: stated_limits("8.0", multiprocessors=108, l2_bytes=40 << 20))
    assert "which compute capability 8.0 lacks" in str(suites._not_hopper(one.workload((64, 512, 1), "bfloat16")))


@pytest.mark.parametrize(
    ("lengths", "causal", "most"),
    [
        *(((50, 50), False, 1500), ((50, 37), False, 20000), ((33, 50), False, 2**28)),
        *(((50, 50), True, 20000), ((50, 37), True, 1500), ((33, 50), True, 1500)),
    ],
)
def test_the_truth_of_the_suites_in_pieces_is_the_formula(
    causal: bool, lengths: tuple[int, int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Call(dtype=torch.float64, batch=3, heads=6, kv_heads=3, queries=lengths[0], keys=lengths[1])
    (q, k, v), _ = call.inputs(CPU)
    whole = reference.attention(q, k, v, causal=causal)[0]
    monkeypatch.setattr(suites, "PIECE", most)
    parts = suites.formula(q, k, v, causal)
    torch.testing.assert_close(parts, whole)
    dout = torch.randn_like(whole)
    torch.testing.assert_close(*(torch.autograd.grad(out, (q, k, v), dout) for out in (parts, whole)))


@pytest.mark.parametrize(("steps", "heads"), [(32, 64), (2048, 64), (64, 100), (64, 512), (1024, 1)])
def test_splits_of_a_cache_load_multiprocessors_evenly(steps: int, heads: int) -> None:
    multiprocessors = 132
    splits = _splits(steps, heads, multiprocessors)
    fullest = -(-splits * heads // multiprocessors) * -(-steps // splits)
    assert fullest <= 1.1 * steps * heads / multiprocessors
