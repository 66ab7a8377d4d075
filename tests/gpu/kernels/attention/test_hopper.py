"""Attention on Hopper: the contract of forward and backward, layouts, NaN, repeated runs.

The backward is a function of what the forward hands over, and so is its truth: the result as it was rounded to 16
bits, of which Δ is a sum. Where an outlier of dO meets a weight near one, that rounding alone can be five times what
attention written out has, in cuDNN's and FlashAttention-2's backward too; without outliers, truth is the whole's.
"""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.kernels.attention import hopper_calls
from tests.gpu.kernels.attention.hopper_calls import BANDS, LENGTHS, request_of, tensors
from tests.waiting import HANG_S
from tilewright.hardware.architectures import limits_of
from tilewright.kernels import by_recipe
from tilewright.kernels.attention.hopper import backward as hopper_backward
from tilewright.kernels.attention.hopper import forward as hopper_forward
from tilewright.kernels.attention.reference import attention as written_out
from tilewright.kernels.attention.request import Request
from tilewright.measure.truth.contract import compare

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability(GPU) == (9, 0)
if torch.cuda.is_available() and not HOPPER:
    pytest.skip("the kernels are for compute capability 9.0", allow_module_level=True)
Tensors = tuple[torch.Tensor, ...]


def gradients(
    request: Request, inputs: Tensors, dtype: torch.dtype, given: torch.Tensor | None = None
) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    """dq, dk and dv of attention written out, its result and log-sum-exp, all computed in `dtype`.

    With Δ of the result `given`, if there is one: dS = P ∘ (dP − Δ), and the gradient of lse is what P is times.
    """
    q, k, v, dout = (x.to(dtype).detach().requires_grad_() for x in inputs)
    out, lse = written_out(q, k, v, window=(request.left, request.right), scale=request.scale)
    dout = dout.detach()
    more = torch.zeros_like(lse) if given is None else (dout * (out - given)).sum(-1).detach()
    return torch.autograd.grad((out, lse), (q, k, v), (dout, more)), out.detach(), lse.detach()


def computed(
    request: Request,
    inputs: Tensors,
    out: torch.Tensor,
    lse: torch.Tensor,
    dq_warps: bool | None = None,
    ping_pong: bool = False,
) -> Tensors:
    """dq, dk and dv in memory that held NaN; as is thought best, or by spare warps or not, in turns or not."""
    assert hopper_backward.supports(request, limits_of(GPU)) is None
    plan = None
    if dq_warps is not None:
        shape = hopper_backward.SHAPES[64 if inputs[0].shape[3] <= 64 else 128]
        plan = hopper_backward.planned(request, limits_of(GPU), shape, dq_warps, ping_pong)
    return hopper_calls.backward(request, inputs, out, lse, plan)


def forward_of(request: Request, inputs: Tensors) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    """The true gradients, and what a forward would hand over."""
    truth, out, lse = gradients(request, inputs, torch.float64)
    return truth, torch.empty_like(inputs[3]).copy_(out), lse.float()


def forward(request: Request, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and log-sum-exp, in memory that held NaN."""
    assert hopper_forward.supports(request, limits_of(GPU)) is None
    return hopper_calls.forward(request, q, k, v)


def assert_forward(request: Request, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The contract of the result and of the log-sum-exp."""
    out, lse = forward(request, q, k, v)
    options = {"window": (request.left, request.right), "scale": request.scale, "softcap": request.softcap}
    truth, true_lse = written_out(q.double(), k.double(), v.double(), **options)  # type: ignore[arg-type]
    eager, _ = written_out(q, k, v, **options)  # type: ignore[arg-type]
    verified = compare(out, eager, truth)
    assert verified.ok, verified
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-5, atol=1e-4)


def assert_backward(
    request: Request, inputs: Tensors, whole: bool = False, dq_warps: bool | None = None, ping_pong: bool = False
) -> None:
    """Against the true gradients of what the kernel is given, or of the `whole`, forward and backward."""
    truth, out, lse = forward_of(request, inputs)
    if not whole:
        truth, _, _ = gradients(request, inputs, torch.float64, out)
    eager, _, _ = gradients(request, inputs, request.dtype)
    ours = computed(request, inputs, out, lse, dq_warps, ping_pong)
    for name, *three in zip(("dq", "dk", "dv"), ours, eager, truth, strict=True):
        verified = compare(*three, direction="bwd", tensor=name)
        assert verified.ok, verified


def assert_contract(request: Request, inputs: Tensors) -> None:
    assert_forward(request, *inputs[:3])
    assert_backward(request, inputs)


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_the_contract_is_kept(head_size: int, lengths: tuple[int, int], band: tuple[int | None, int | None]) -> None:
    for dtype, along in ((torch.bfloat16, "bhsd"), (torch.float16, "bshd")):
        q, k, v, dout = tensors(*lengths, head_size, dtype, along=along)
        assert_contract(request_of(q, k, v, band), (q, k, v, dout))


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_forward_and_backward_together_keep_the_contract(head_size: int) -> None:
    for lengths, band in itertools.product([(113, 203), (1023, 64), (799, 1025)], BANDS[:3]):
        inputs = tensors(*lengths, head_size, torch.bfloat16, outliers=0)
        assert_backward(request_of(*inputs[:3], band), inputs, whole=True)


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_an_only_score_has_no_gradient(head_size: int) -> None:
    """A weight of one stays one whatever the score: exactly zero, but for the query whose dO is NaN."""
    inputs = tensors(300, 500, head_size, torch.bfloat16)
    request = request_of(*inputs[:3], (0, 0))
    _, out, lse = forward_of(request, inputs)
    dq, dk, _ = computed(request, inputs, out, lse)
    assert (dq == 0).all() and (dk == 0).all()
    inputs[3][1, 2, 7, 3] = math.nan
    dq, _, _ = computed(request, inputs, out, lse)
    assert dq[1, 2, 7].isnan().all()
    dq[1, 2, 7] = 0.0
    assert (dq == 0).all()


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_more_blocks_of_keys_than_programs(head_size: int) -> None:
    """A program then takes one after another, among them blocks that no query sees."""
    for heads, lengths, band in (((48, 48), (300, 500), (None, 0)), ((24, 12), (200, 1500), (50, 0))):
        inputs = tensors(*lengths, head_size, torch.bfloat16, heads=heads)
        assert_contract(request_of(*inputs[:3], band), inputs)


@pytest.mark.parametrize("head_size", [64, 104, 128])
def test_spare_warps_zero_and_round_dq(head_size: int) -> None:
    """Few heads, so that all are zero before; many; grouped; blocks that no query sees; long walks."""
    for heads, lengths, band in itertools.product([(4, 2), (80, 80)], [(1, 3), (203, 799), (640, 384)], BANDS[:3]):
        inputs = tensors(*lengths, head_size, torch.bfloat16, heads=heads)
        assert_backward(request_of(*inputs[:3], band), inputs, dq_warps=True)
    for band in BANDS[:2]:
        inputs = tensors(1500, 1500, head_size, torch.float16, heads=(32, 16), along="bshd")
        assert_backward(request_of(*inputs[:3], band), inputs, dq_warps=True)


@pytest.mark.parametrize("head_size", [104, 128])
def test_warpgroups_take_turns(head_size: int) -> None:
    """Walks of one step, blocks that no query sees, several blocks of keys a program; long walks again and again."""
    few, many = (4, 2), (80, 80)
    cases = (few, (1, 3)), (few, (203, 113)), (few, (1023, 64)), (few, (799, 1025)), (many, (203, 799))
    for (heads, (queries, keys)), band in itertools.product(cases, BANDS[:3]):
        inputs = tensors(queries, keys, head_size, torch.bfloat16, heads=heads)
        assert_backward(request_of(*inputs[:3], band), inputs, dq_warps=False, ping_pong=True)
    inputs = tensors(8200, 8200, head_size, torch.float16, batch=1, heads=(2, 1))
    request = request_of(*inputs[:3], (None, 0))
    _, out, lse = forward_of(request, inputs)
    expected, *again = (
        computed(request, inputs, out, lse, dq_warps=False, ping_pong=ping_pong) for ping_pong in (False, *[True] * 20)
    )
    for dq, dk, dv in again:
        assert torch.equal(dk, expected[1]) and torch.equal(dv, expected[2])
        torch.testing.assert_close(dq, expected[0], rtol=2**-7, atol=float(expected[0].abs().max()) * 2**-9)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_size", [8, 16, 40, 72, 80, 96, 112, 136, 200, 248])
def test_other_head_sizes(head_size: int, causal: bool) -> None:
    q, k, v, dout = tensors(203, 331, head_size, torch.bfloat16)
    assert_contract(request_of(q, k, v, (None, 0 if causal else None)), (q, k, v, dout))


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_long_sequences(head_size: int) -> None:
    for (queries, keys), band in itertools.product([(4173, 300), (1000, 5003)], BANDS[:3]):
        q, k, v, dout = tensors(queries, keys, head_size, torch.bfloat16, batch=1, heads=(4, 2))
        assert_contract(request_of(q, k, v, band), (q, k, v, dout))


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_grouped_heads_strides_and_scale(head_size: int) -> None:
    """Multi-query, and q, k and v as slices of one projection."""
    q, k, v, dout = tensors(331, 331, head_size, torch.bfloat16, heads=(7, 1), batch=3)
    assert_contract(request_of(q, k, v, (None, 0), scale=0.3), (q, k, v, dout))
    joint = torch.randn(2, 300, 3, 4, head_size, device=GPU).bfloat16()
    q, k, v = (joint[:, :, i].transpose(1, 2) for i in range(3))
    assert_contract(request_of(q, k, v, (None, 0)), (q, k, v, torch.randn_like(q)))


def test_nan_stays_where_its_query_is_seen() -> None:
    """A query's NaN reaches its own gradient and the keys that it sees, no other row of dq and no other head."""
    q, k, v, dout = tensors(256, 256, 64, torch.bfloat16)
    q[0, 0, 17, 3] = math.nan
    request = request_of(q, k, v, (None, 0))
    found, _ = forward(request, q, k, v)
    assert found[0, 0, 17].isnan().all() and int(found.isnan().sum()) == found.shape[3]
    _, out, lse = forward_of(request, (q, k, v, dout))
    dq, dk, dv = computed(request, (q, k, v, dout), out, lse)
    assert dq[0, 0, 17].isnan().all() and int(dq.isnan().sum()) == dq.shape[3]
    for x in (dk, dv):
        assert x[0, 0, :18].isnan().all()
        assert x[0, 1].isfinite().all() and x[1].isfinite().all()


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_again_and_again(head_size: int) -> None:
    """Results, dk and dv have the same bits in every run; dq is summed in no fixed order."""
    for band in BANDS[:3]:
        q, k, v, dout = tensors(1500, 1500, head_size, torch.bfloat16, heads=(16, 4))
        request = request_of(q, k, v, band)
        _, out, lse = forward_of(request, (q, k, v, dout))
        dq, dk, dv = computed(request, (q, k, v, dout), out, lse)
        first = forward(request, q, k, v)
        for _ in range(50):
            assert all(torch.equal(a, b) for a, b in zip(first, forward(request, q, k, v), strict=True))
            again = computed(request, (q, k, v, dout), out, lse)
            assert torch.equal(again[1], dk) and torch.equal(again[2], dv)
            torch.testing.assert_close(again[0], dq, rtol=2**-7, atol=float(dq.abs().max()) * 2**-9)


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_a_plan_has_as_many_programs_as_run_at_once(head_size: int) -> None:
    """The plan computes from the device's limits what the driver says of the kernel."""
    q, k, v, _ = tensors(2048, 2048, head_size, torch.bfloat16, heads=(96, 96))
    request = request_of(q, k, v)
    plan = hopper_backward.plan(request, limits_of(GPU))
    main = hopper_backward.built(plan, request).main
    assert plan.programs == main.programs_at_once() * plan.shape.cluster


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sizes", [(192, 128), (48, 256)], ids=str)
def test_values_of_another_head_size(sizes: tuple[int, int], causal: bool) -> None:
    q, k, v, _ = tensors(203, 331, sizes[0], torch.bfloat16, value_size=sizes[1])
    assert_forward(request_of(q, k, v, (None, 0 if causal else None)), q, k, v)


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("band", BANDS[:3], ids=str)
def test_soft_cap_and_scale(band: tuple[int | None, int | None], head_size: int) -> None:
    q, k, v, _ = tensors(203, 331, head_size, torch.bfloat16)
    assert_forward(request_of(q, k, v, band, softcap=3.0), q, k, v)
    assert_forward(request_of(q, k, v, band, scale=0.3), q, k, v)


def test_queries_that_see_no_key() -> None:
    q, k, v, _ = tensors(300, 100, 128, torch.bfloat16)
    out, lse = forward(request_of(q, k, v, (None, 0)), q, k, v)
    assert (out[:, :, :200] == 0).all() and (lse[:, :, :200] == -math.inf).all()
    assert out[:, :, 200:].abs().sum() > 0 and lse[:, :, 200:].isfinite().all()


def test_a_plan_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no table can be sent to the device: the hardware deals out the tiles."""
    q, k, v, _ = tensors(700, 700, 128, torch.bfloat16, heads=(16, 4))
    request = request_of(q, k, v, (None, 0))

    def refuse(*_: object) -> None:
        raise hopper_forward.NoTable

    # Its code is loaded before.
    with monkeypatch.context() as without_table:
        without_table.setattr(hopper_forward, "plan_with_table", refuse)
        by_recipe._built.cache_clear()
        expected = forward(request, q, k, v)
    kept = dict(hopper_forward._ORDERS)
    by_recipe._built.cache_clear()
    hopper_forward._ORDERS.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = forward(request, q, k, v)
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
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    assert any(tmp_path.rglob("*.cubin"))
