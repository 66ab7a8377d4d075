"""Whose kernels an attention runs on: what is refused and why; the rest in Triton's interpreter, on its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.graphs import aten, calls, run
from tests.processes import run_interpreted
from tilewright.hardware.architectures import stated_limits
from tilewright.hardware.target import target_named
from tilewright.kernels.attention.request import Request
from tilewright.passes.attention import kernel
from tilewright.passes.attention.constants import Constants
from tilewright.passes.attention.fused import CUDNN, PEERS, FusedAttention, Peer
from tilewright.passes.attention.kernel import choose_kernels
from tilewright.passes.attention.spelling import Refusal
from tilewright.passes.attention.visible import Band

CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
SHAPES = ((2, 3, 7, 16),) * 3


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted(Path(__file__).with_name("interpreted_kernel.py"))


def test_on_a_cpu_pytorch_computes_it_and_the_graph_stays() -> None:
    graph = aten(attention, *(torch.randn(shape) for shape in SHAPES))
    before = calls(graph)
    (decision,) = choose_kernels(graph, target_named("cpu"))
    assert calls(graph) == before
    assert decision.verdict == "refused" and "captured on a CPU" in decision.reason
    assert decision.consumer == "_scaled_dot_product_flash_attention_for_cpu" and decision.producer == "q_1"


def refusal(function: object, monkeypatch: pytest.MonkeyPatch, *inputs: Tensor) -> str:
    """Why a graph as for a GPU keeps PyTorch's kernel."""
    monkeypatch.setenv("TILEWRIGHT_TARGET", "triton")
    # Imported first: what it takes from `device` would stay replaced for the tests that follow.
    pytest.importorskip("tilewright.kernels.attention.decode.triton")
    monkeypatch.setattr("tilewright.kernels.device.interpreted", lambda: True)
    graph = aten(function, *(inputs or tuple(torch.randn(shape) for shape in SHAPES)))  # type: ignore[arg-type]
    before = calls(graph)
    (decision,) = choose_kernels(graph, target_named("cpu"))
    assert decision.verdict == "refused" and calls(graph) == before
    run(graph, *(inputs or tuple(torch.randn(shape) for shape in SHAPES)))
    return decision.reason


def test_what_reads_the_statistics_keeps_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = refusal(lambda q, k, v: CPU(q, k, v)[1].exp(), monkeypatch)
    assert reason == "stays with PyTorch's attention for CPUs: exp reads result 1 of PyTorch's own kernel"
    reason = refusal(lambda q, k, v: CPU(q, k, v), monkeypatch)
    assert "the caller reads result 1" in reason


def through_cudnn(mask: Callable[[Tensor, Tensor], Tensor], fill: float) -> Callable[..., Tensor]:
    """A call of cuDNN's kernel under a bool mask of places, as PyTorch adds it."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = mask(torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])).expand(2, 1, -1, -1)
        added = torch.where(seen, 0.0, torch.scalar_tensor(fill, dtype=q.dtype))
        out: Tensor = CUDNN.forward(q, k, v, added, False)[0]
        return out

    return function


@pytest.mark.parametrize("fill", [-torch.inf, -65504.0])
def test_the_number_that_hides_a_key_from_cudnn_is_read_as_a_band(fill: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # Imported first, as in `refusal`.
    pytest.importorskip("tilewright.kernels.attention.decode.triton")
    monkeypatch.setattr("tilewright.kernels.device.interpreted", lambda: True)

    def of(mask: Callable[[Tensor, Tensor], Tensor], peer: Peer = CUDNN) -> FusedAttention:
        inputs = (torch.randn(2, 3, 24, 16, dtype=torch.bfloat16) for _ in range(3))
        graph = aten(through_cudnn(mask, fill), *inputs)
        (node,) = graph.find_nodes(op="call_function", target=CUDNN.forward)
        return FusedAttention(node, replace(peer, backward=CUDNN.backward), Constants(graph), target_named("cpu"))

    window = of(lambda i, j: (j <= i) & (j > i - 5))
    assert window.band == Band(4, 0) and window.masks == ()
    # Where some query sees no key, only -inf gives zeros; and the other kernels are not given that number by PyTorch.
    for found in (of(lambda i, j: j < i), of(lambda i, j: j <= i, PEERS[0])):
        assert (found.masks == ()) == (fill == -torch.inf)


@pytest.mark.parametrize(
    ("function", "inputs", "reason"),
    [
        (lambda q, k, v: CPU(q, k, v)[0], [torch.randn(2, 3, 7, 300)] * 3, "head sizes above 256"),
        (lambda q, k, v: CPU(q, k, v)[0], [torch.randn(2, 3, 7, 16).double()] * 3, "float64"),
        (
            lambda q, k, v: CPU(q, k.expand(2, 3, 7, 16), v)[0],
            [torch.randn(2, 3, 7, 16), torch.randn(2, 1, 7, 16), torch.randn(2, 3, 7, 16)],
            "an expanded operand",
        ),
    ],
    ids=["wide heads", "float64", "expanded"],
)
def test_what_the_kernels_do_not_take(
    function: object, inputs: list[Tensor], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reason in refusal(function, monkeypatch, *inputs)


def request(batch: int, **others: Any) -> Request:
    """A causal call in bf16 on a GPU: 2·B·12·1024²·64 FLOPs forward."""
    strides = (1024 * 12 * 64, 64, 12 * 64, 1)
    sizes = batch, 12, 12, 1024, 1024, 64, 64, strides, strides, strides
    whole = Request(torch.device("cuda:0"), torch.bfloat16, *sizes, True, 0.125, None, 0)
    return whole._replace(**others)


def test_what_is_known_to_be_fast_without_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = stated_limits("9.0", multiprocessors=132, l2_bytes=60 << 20)
    monkeypatch.setattr(kernel, "limits_of", lambda device: limits)
    monkeypatch.setattr("tilewright.kernels.attention.hopper.backward.available", lambda device: True)
    hopper = ["hopper.forward", "hopper.backward"]
    kernel._check_fast(request(16), hopper)
    kernel._check_fast(request(1), hopper[:1])
    kernel._check_fast(request(1), hopper)
    with pytest.raises(Refusal, match="a mask: not in these kernels, and what takes it was not raced"):
        kernel._check_fast(request(16, mask="additive"), ["portable.launch", "portable.launch"])
    with pytest.raises(Refusal, match="a deterministic order, and what takes it was not raced"):
        kernel._check_fast(request(16, deterministic=True), ["hopper.forward", "portable.launch"])
    with pytest.raises(Refusal, match="float32: the matrix instructions take 16-bit floats"):
        kernel._check_fast(request(16, dtype=torch.float32), ["portable.launch"])


def test_a_token_that_sees_a_cache_through_a_mask_is_split_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    split = ["decode.triton"]
    kernel._check_fast(request(32, mask="boolean", queries=1, kv_heads=4), split)
    kernel._check_fast(request(8, mask="boolean", queries=1), split)
    monkeypatch.setattr(kernel, "limits_of", lambda device: None)
    monkeypatch.setattr("tilewright.kernels.attention.hopper.forward.supports", lambda request, limits: None)
    for refused in (request(32, mask="boolean", queries=1), request(8, mask="none", queries=1)):
        with pytest.raises(Refusal, match="the kernel in Triton, split over the keys comes first, and what takes it"):
            kernel._check_fast(refused, split)


def test_many_short_sequences_that_fill_no_tiles_are_left_to_cudnn() -> None:
    def of(batch: int, length: int) -> Request:
        return request(batch, queries=length, keys=length)

    assert kernel._fills_no_tiles(of(64, 197)) and kernel._fills_no_tiles(of(256, 50))
    assert not any(kernel._fills_no_tiles(of(batch, length)) for batch, length in ((64, 128), (64, 1000), (1, 197)))


def test_every_fused_attention_of_pytorch_is_known_with_its_backward() -> None:
    for peer in PEERS:
        forward, backward = (str(target).removesuffix(".default") for target in (peer.forward, peer.backward))
        assert backward == f"{forward}_backward"
        assert {"query", "key", "value", "dropout_p", "is_causal", "scale"} <= {
            argument.name for argument in peer.forward._schema.arguments
        }
        assert {"query", "key", "value", "out"} <= {argument.name for argument in peer.backward._schema.arguments}
