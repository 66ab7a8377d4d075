"""Attention forward on Hopper: the contract, empty rows, layouts, streams and graphs, no second compilation."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.kernels.attention import hopper_calls
from tests.gpu.kernels.attention.hopper_calls import BANDS, LENGTHS, request_of
from tests.waiting import HANG_S
from tilewright.hardware.architectures import limits_of
from tilewright.kernels import by_recipe
from tilewright.kernels.attention.hopper import forward as hopper_forward
from tilewright.kernels.attention.reference import attention as written_out
from tilewright.kernels.attention.request import Request
from tilewright.measure.truth.contract import compare

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability(GPU) == (9, 0)
if torch.cuda.is_available() and not HOPPER:
    pytest.skip("the kernel is for compute capability 9.0", allow_module_level=True)


def tensors(*sizes: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of `hopper_calls.tensors`."""
    q, k, v, _ = hopper_calls.tensors(*sizes, **options)
    return q, k, v


def computed(request: Request, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and log-sum-exp, in memory that held NaN."""
    assert hopper_forward.supports(request, limits_of(GPU)) is None
    return hopper_calls.forward(request, q, k, v)


def assert_contract(request: Request, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    out, lse = computed(request, q, k, v)
    options = {"window": (request.left, request.right), "scale": request.scale, "softcap": request.softcap}
    truth, true_lse = written_out(q.double(), k.double(), v.double(), **options)  # type: ignore[arg-type]
    eager, _ = written_out(q, k, v, **options)  # type: ignore[arg-type]
    verified = compare(out, eager, truth)
    assert verified.ok, verified
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_the_contract_is_kept(head_size: int, lengths: tuple[int, int], band: tuple[int | None, int | None]) -> None:
    for dtype, along in ((torch.bfloat16, "bhsd"), (torch.float16, "bshd")):
        q, k, v = tensors(*lengths, head_size, dtype, along=along)
        assert_contract(request_of(q, k, v, band), q, k, v)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "sizes", [(16, 16), (40, 40), (72, 72), (80, 80), (96, 96), (112, 112), (192, 128), (48, 256)], ids=str
)
def test_other_head_sizes(sizes: tuple[int, int], causal: bool) -> None:
    q, k, v = tensors(203, 331, sizes[0], torch.bfloat16, value_size=sizes[1])
    assert_contract(request_of(q, k, v, (None, 0 if causal else None)), q, k, v)


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_long_sequences_take_other_tiles(head_size: int) -> None:
    """From 4096 keys on head size 64 has three warpgroups; a program has several tiles."""
    for (queries, keys), band in itertools.product([(4096, 4096), (1000, 5003)], BANDS[:3]):
        q, k, v = tensors(queries, keys, head_size, torch.bfloat16, batch=1, heads=(6, 3))
        assert_contract(request_of(q, k, v, band), q, k, v)


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("band", BANDS[:3], ids=str)
def test_soft_cap_and_scale(band: tuple[int | None, int | None], head_size: int) -> None:
    q, k, v = tensors(203, 331, head_size, torch.bfloat16)
    assert_contract(request_of(q, k, v, band, softcap=3.0), q, k, v)
    assert_contract(request_of(q, k, v, band, scale=0.3), q, k, v)


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_grouped_heads_and_strides(head_size: int) -> None:
    """Multi-query, and q, k and v as slices of one projection."""
    q, k, v = tensors(331, 331, head_size, torch.bfloat16, heads=(7, 1), batch=3)
    assert_contract(request_of(q, k, v, (None, 0)), q, k, v)
    joint = torch.randn(2, 300, 3, 4, head_size, device=GPU).bfloat16()
    q, k, v = (joint[:, :, i].transpose(1, 2) for i in range(3))
    assert_contract(request_of(q, k, v, (None, 0)), q, k, v)


def test_queries_that_see_no_key() -> None:
    q, k, v = tensors(300, 100, 128, torch.bfloat16)
    out, lse = computed(request_of(q, k, v, (None, 0)), q, k, v)
    assert (out[:, :, :200] == 0).all() and (lse[:, :, :200] == -math.inf).all()
    assert out[:, :, 200:].abs().sum() > 0 and lse[:, :, 200:].isfinite().all()


def test_nan_stays_in_its_row() -> None:
    q, k, v = tensors(256, 256, 64, torch.bfloat16)
    q[0, 0, 17, 3] = math.nan
    out, lse = computed(request_of(q, k, v, (None, 0)), q, k, v)
    assert out[0, 0, 17].isnan().all() and lse[0, 0, 17].isnan()
    assert int(out.isnan().sum()) == out.shape[3]


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_the_same_bits_again_and_again(head_size: int) -> None:
    for band in BANDS[:3]:
        q, k, v = tensors(1500, 1500, head_size, torch.bfloat16, heads=(16, 4))
        request = request_of(q, k, v, band)
        first = computed(request, q, k, v)
        for _ in range(20):
            again = computed(request, q, k, v)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_in_a_graph_and_on_a_side_stream() -> None:
    q, k, v = tensors(500, 500, 128, torch.bfloat16)
    request = request_of(q, k, v, (None, 0))
    expected = computed(request, q, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda._sleep(50_000_000)
    with torch.cuda.stream(stream):
        aside = computed(request, q, k, v)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = computed(request, q, k, v)
    graph.replay()
    torch.cuda.synchronize()
    for found in (aside, replayed):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_plan_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no table can be sent to the device: the hardware deals out the tiles."""
    q, k, v = tensors(700, 700, 128, torch.bfloat16, heads=(16, 4))
    request = request_of(q, k, v, (None, 0))

    def refuse(*_: object) -> None:
        raise hopper_forward.NoTable

    # Its code is loaded before.
    with monkeypatch.context() as without_table:
        without_table.setattr(hopper_forward, "placed", refuse)
        by_recipe._built.cache_clear()
        expected = computed(request, q, k, v)
    kept = dict(hopper_forward._ORDERS)
    by_recipe._built.cache_clear()
    hopper_forward._ORDERS.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = computed(request, q, k, v)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert not hopper_forward._ORDERS
    hopper_forward._ORDERS.update(kept)
    by_recipe._built.cache_clear()


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_by_the_assembler_of_cuda(head_size: int, tmp_path: Path) -> None:
    """Triton brings an assembler of its own; that of the CUDA toolkit must make of the kernels what it does."""
    assembler = Path("/usr/local/cuda/bin/ptxas")
    if not assembler.exists():
        pytest.skip("there is no CUDA toolkit here")
    environment = {**os.environ, "TRITON_PTXAS_PATH": str(assembler), "TRITON_CACHE_DIR": str(tmp_path)}
    name = f"{__file__}::test_the_contract_is_kept[{head_size}-(1025, 1025)-(None, 0)]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    assert any(tmp_path.rglob("*.cubin"))
