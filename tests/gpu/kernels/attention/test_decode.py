"""Few queries against a long cache on a GPU: the numbers contract, hidden keys, splits that are combined."""

import itertools
from typing import Any

import pytest
import torch

from tests.gpu.kernels.launching import DTYPES, in_turn
from tests.kernels.attention.calls import Call
from tilewright.kernels.attention import attention, dispatch, reference
from tilewright.kernels.attention.decode import triton as decode
from tilewright.kernels.attention.registered import request_of
from tilewright.measure.truth.contract import compare

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
SIZES = [
    (1, 8, 1, 1, 512), (2, 16, 2, 1, 5000), (8, 64, 8, 1, 4096), (1, 1, 1, 1, 777), (3, 12, 3, 3, 1025),
    (1, 16, 1, 1, 8191), (1, 8, 8, 1, 799), (64, 8, 8, 1, 640), (1, 2, 1, 8, 3001), (1, 4, 4, 16, 2048),
]  # fmt: skip
"""Batch, heads, heads of k and v, queries, keys."""
OPTIONS: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (600, None)}, {"window": (300, 5), "scale": -0.2}]


@pytest.mark.parametrize(
    ("size", "width", "dtype"), in_turn(itertools.product(SIZES, (64, 80, 128, 256)), [DTYPES[1:]]), ids=str
)
def test_the_numbers_contract(size: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
    names = ("batch", "heads", "kv_heads", "queries", "keys")
    for options, layout, outliers in itertools.product(OPTIONS, ("heads", "positions"), (False, True)):
        sizes = dict(zip(names, size, strict=True))
        call = Call(**sizes, head_size=width, dtype=dtype, layout=layout, outliers=outliers, options=options)  # type: ignore[arg-type]
        assert by(call) is decode
        check(call)


def test_many_heads_of_a_key_head_and_a_soft_cap() -> None:
    for call in (
        Call(batch=2, heads=64, kv_heads=2, queries=1, keys=3000, head_size=128),
        Call(batch=2, heads=128, kv_heads=2, queries=1, keys=3000, head_size=128, options={"softcap": 3.0}),
        Call(batch=2, heads=128, kv_heads=2, queries=1, keys=3000, head_size=256, options={"softcap": 3.0}),
    ):
        assert by(call) is decode
        check(call)


def test_a_query_that_sees_no_key_gives_zeros() -> None:
    call = Call(batch=2, heads=8, kv_heads=1, queries=2, keys=700, head_size=128, options={"window": (None, -699)})
    (q, k, v), options = call.inputs(GPU)
    out, lse = attention(q.detach(), k.detach(), v.detach(), return_lse=True, **options)
    assert (out[:, :, 0] == 0).all()
    assert (lse[:, :, 0] == -torch.inf).all()
    # The second sees the first key alone.
    assert torch.equal(out[:, :, 1], v[:, :, 0].expand(2, 8, 128))


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("place", ["k", "v"])
def test_nan_and_infinity_reach_what_they_reach_in_eager(place: str, value: float) -> None:
    tensors = [x.detach() for x in Call(heads=8, kv_heads=2, queries=1, keys=3000, head_size=128).inputs(GPU)[0]]
    tensors["qkv".index(place)][0, 1, 2000, 3] = value
    out, true = attention(*tensors), reference.attention(*tensors)[0]
    assert torch.equal(out.isnan(), true.isnan())
    assert torch.equal(out.isinf(), true.isinf())


def by(call: Call) -> Any:
    """The module that computes a call."""
    q, k, v = call.inputs(GPU)[0]
    left, right = call.options.get("window", (None, None))
    right = 0 if call.options.get("causal") else right
    nothing = (None, None, None, None)
    softcap = call.options.get("softcap", 0.0)
    request = request_of(q, k, v, *nothing, 1.0, left, right, softcap, 0.0, 0, 0, False)
    return dispatch.select(request, "auto", False)


def check(call: Call) -> None:
    """The numbers contract, twice the same bits, in memory that held NaN."""
    tensors, options = call.inputs(GPU)
    tensors = [x.detach() for x in tensors]
    # What is freed here is handed out again, to the results of the call.
    poison = [torch.full_like(tensors[0], torch.nan), torch.full(tensors[0].shape[:3], torch.nan, device=GPU)]
    del poison
    out, lse = attention(*tensors, return_lse=True, **options)
    again = attention(*tensors, return_lse=True, **options)
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])
    true, true_lse = reference.attention(*(x.double() for x in tensors), **options)
    eager, _ = reference.attention(*tensors, **options)
    assert compare(out, eager, true).ok
    torch.testing.assert_close(lse.double(), true_lse, rtol=2e-6, atol=2e-5)
