"""Attention's calls in C++ on a GPU: the contract, streams, graphs, threads, and what they cost the host."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch

from tests.gpu.kernels.launching import on_a_side_stream, replayed, values_of
from tests.kernels.attention.calls import Call, wrong
from tilewright.kernels.attention import attention
from tilewright.kernels.attention.native import EXTENSION

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
if torch.cuda.is_available() and torch.cuda.get_device_capability(GPU) != (9, 0):
    pytest.skip("the kernels are for compute capability 9.0", allow_module_level=True)
CALLS = [
    Call(queries=128, keys=128, head_size=64, options={"causal": True}),
    Call(batch=2, heads=4, kv_heads=2, queries=203, keys=311, head_size=64, layout="positions"),
    Call(batch=2, heads=6, kv_heads=2, queries=300, keys=257, head_size=128, options={"window": (70, 20)}),
    Call(queries=1023, keys=1025, head_size=256, options={"causal": True}),
    Call(queries=113, keys=799, head_size=40, dtype=torch.float16),
    Call(queries=1, keys=333, head_size=128),
    Call(queries=333, keys=3, head_size=128),
    Call(queries=333, keys=333, head_size=64, options={"window": (0, 0)}),
    Call(queries=333, keys=333, head_size=64, options={"deterministic": True}),
    Call(queries=333, keys=333, head_size=64, options={"softcap": 2.0}),
]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    with torch.no_grad():
        attention(*drawn())
    assert EXTENSION.wait()


def again(*tensors: torch.Tensor, **options: Any) -> Any:
    """The second call of its kind: the first finds out what it is."""
    attention(*tensors, **options)
    return attention(*tensors, **options)


def drawn(**sizes: Any) -> list[torch.Tensor]:
    return Call(**({"queries": 256, "keys": 256, "head_size": 64, "heads": 16, "kv_heads": 16} | sizes)).inputs(GPU)[0]


def in_cpp(out: torch.Tensor) -> bool:
    return out.grad_fn is not None and "TilewrightAttention" in out.grad_fn.name()


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_contract_is_kept(call: Call) -> None:
    tensors, options = call.inputs(GPU)
    assert in_cpp(again(*tensors, **options))
    assert wrong(call, GPU, impl=again) == []


def test_streams_and_graphs() -> None:
    inputs = drawn()
    call = functools.partial(again, causal=True)
    plain = values_of(call, inputs)
    for impl in (on_a_side_stream, replayed):
        for mine, true in zip(impl(call, inputs), plain, strict=True):
            torch.testing.assert_close(mine, true, rtol=2**-6, atol=2**-6)


def test_the_gradient_of_the_log_sum_exp_and_of_an_expanded_sum() -> None:
    inputs = drawn()
    out, lse = again(*inputs, return_lse=True)
    together = torch.autograd.grad(out.sum() + lse.sum(), inputs, retain_graph=True)
    apart = [torch.autograd.grad(x.sum(), inputs, retain_graph=True) for x in (out, lse)]
    for both, one, other in zip(together, *apart, strict=True):
        torch.testing.assert_close(both.float(), one.float() + other.float(), rtol=2**-6, atol=2**-5)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(out.sum(), inputs, create_graph=True)[0].sum().backward()


def test_threads() -> None:
    several = [drawn(queries=length, keys=length) for length in (128, 192, 256, 320)]
    true = [values_of(again, inputs) for inputs in several]
    got: dict[int, list[list[torch.Tensor]]] = {}

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            got[i] = [values_of(again, several[i]) for _ in range(10)]
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(several))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, rounds in got.items():
        for mine, expected in ((m, e) for values in rounds for m, e in zip(values, true[i], strict=True)):
            torch.testing.assert_close(mine, expected, rtol=2**-6, atol=2**-6)
