"""Attention's calls in C++ on a driver that launches nothing: results, gradients, and what falls to Python."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from tests.kernels.attention.driver import (
    CONTEXT,
    FINISH,
    FORWARD,
    MAIN,
    PREPARE,
    STREAM,
    Imagined,
    attended,
    kernels,
    request_of,
)
from tilewright.kernels import nvrtc
from tilewright.kernels.attention import direct, dispatch, native
from tilewright.kernels.attention.hopper import backward as hopper_backward
from tilewright.kernels.attention.hopper import chain
from tilewright.kernels.attention.hopper import launch as hopper_launch
from tilewright.kernels.attention.native import EXTENSION
from tilewright.kernels.attention.request import Operands

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
SINK = torch.empty(2**12)


@pytest.fixture(scope="module")
def library() -> ModuleType:
    return EXTENSION.load(EXTENSION.built())


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Imagined:
    made = Imagined()
    monkeypatch.setattr(native, "driver_of", lambda device: made.table)
    return made


def tensors(
    lengths: tuple[int, int] = (70, 130), heads: tuple[int, int] = (4, 2), along: str = "bhsd", width: int = 64
) -> Tensors:
    """q, k and v of two batch entries that want a gradient, in memory `along`."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for count, length in ((heads[0], lengths[0]), (heads[1], lengths[1]), (heads[1], lengths[1])):
        sizes = {"b": 2, "h": count, "s": length, "d": width}
        x = torch.randn([sizes[axis] for axis in along], generator=generator).bfloat16()
        made.append(x.permute([along.index(axis) for axis in "bhsd"]).requires_grad_())
    return tuple(made)  # type: ignore[return-value]


def called(
    library: ModuleType, inputs: Tensors, monkeypatch: pytest.MonkeyPatch, trained: bool = True, sink: bool = True,
    otherwise: Callable[..., Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """`direct.run` of these tensors, natively."""
    request = request_of(*inputs)
    forward, backward = kernels(request)
    monkeypatch.setattr(dispatch, "select", lambda *_: hopper_backward)
    monkeypatch.setattr(hopper_backward, "bound", lambda _: backward)
    memory = SINK if sink else None
    otherwise = otherwise or functools.partial(direct._gradient, request)
    made = native.course(library, request, inputs, forward, trained, memory, otherwise)
    return functools.partial(library.attend, made)


def reference(inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = inputs
    return attended(q, k, v, q.shape[3] ** -0.5)


def assert_right(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    """Up to bf16, and up to the result's own rounding in the gradients."""
    for one, other in zip(got, (x.detach() for x in want), strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other.double(), rtol=2**-7, atol=2**-7 * other.abs().max().item())


@pytest.mark.parametrize("along", ["bhsd", "bshd", "sbhd"])
@pytest.mark.parametrize(("lengths", "heads", "width"), [((70, 130), (4, 2), 64), ((1, 65), (3, 1), 40)], ids=str)
def test_results_and_gradients(
    lengths: tuple[int, int], heads: tuple[int, int], width: int, along: str, library: ModuleType, driver: Imagined,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    inputs = tensors(lengths, heads, along, width)
    run = called(library, inputs, monkeypatch)
    out = run(*inputs, False)
    dout = torch.randn_like(out)
    want, _ = reference(inputs)
    assert_right((out, *torch.autograd.grad(out, inputs, dout)), (want, *torch.autograd.grad(want, inputs, dout)))
    assert [kernel for kernel, _ in driver.launches] == [FORWARD, PREPARE, MAIN, FINISH]
    out, lse = run(*inputs, True)
    assert_right(
        (lse, *torch.autograd.grad(out, inputs, dout)),
        (reference(inputs)[1], *torch.autograd.grad(reference(inputs)[0], inputs, dout)),
    )
    assert driver.launches[4:] == driver.launches[:4]
    assert out.stride() == dispatch.strides_like(inputs[0], width)[1]


def test_python_launches_the_same(monkeypatch: pytest.MonkeyPatch, driver: Imagined) -> None:
    def launch(self: nvrtc.Kernel, x: int, y: int, z: int, stream: int, pointers: int) -> None:
        assert driver.launch(self.function, x, y, z, self.threads, 1, 1, 0, stream, pointers, None) == 0

    monkeypatch.setattr(nvrtc.Kernel, "launch", launch)
    monkeypatch.setattr(nvrtc, "stream", lambda device: STREAM)
    monkeypatch.setattr(hopper_backward, "stream", lambda device: STREAM)
    monkeypatch.setattr(chain, "make_current", lambda device: None)
    monkeypatch.setattr(hopper_launch, "_encode", lambda: driver._entries[1])
    for along in ("bhsd", "bshd"):
        inputs = tensors(along=along)
        request = request_of(*inputs)
        forward, backward = kernels(request)
        q, k, v = (x.detach() for x in inputs)
        operands = Operands(q, k, v)
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
        forward(operands, out, lse)
        dout = torch.randn(q.shape).bfloat16()
        made = tuple(torch.empty_like(x) for x in (q, k, v))
        backward(operands, out, lse, dout, *made)
        want, sums = reference(inputs)
        assert_right((out, lse, *made), (want.detach(), sums.detach(), *torch.autograd.grad(want, inputs, dout)))


def test_what_nobody_asked_for_is_not_kept(
    library: ModuleType, driver: Imagined, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = tensors()
    with_sink, without = (called(library, inputs, monkeypatch, sink=sink) for sink in (True, False))
    with torch.no_grad():
        for run in (with_sink, without):
            out, lse = run(*inputs, True)
            assert_right((run(*inputs, False), out, lse), (reference(inputs)[0], *reference(inputs)))
    plain = [x.detach() for x in inputs]
    assert not with_sink(*plain, False).requires_grad
    # One operand's gradient is enough for a graph.
    out = with_sink(plain[0], inputs[1], plain[2], False)
    (dk,) = torch.autograd.grad(out, inputs[1], torch.ones_like(out))
    (want,) = torch.autograd.grad(reference(inputs)[0], inputs[1], torch.ones_like(out))
    assert_right((dk,), (want,))


def test_python_takes_what_is_left(library: ModuleType, driver: Imagined, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, bool]] = []

    def otherwise(dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> Any:
        asked.append((dout is None, dlse is None))
        assert lse.shape == q.shape[:3]
        return tuple(torch.zeros_like(x) for x in (q, k, v))

    inputs = tensors()
    run = called(library, inputs, monkeypatch, otherwise=otherwise)
    out, lse = run(*inputs, True)
    torch.autograd.grad(lse.sum(), inputs, retain_graph=True)
    torch.autograd.grad((out, lse), inputs, (torch.ones_like(out), torch.ones_like(lse)), retain_graph=True)
    torch.autograd.grad(out, inputs, torch.ones_like(out), create_graph=True)
    assert asked == [(True, False), (False, False), (False, True)]
    asked.clear()
    untrained = called(library, inputs, monkeypatch, trained=False, otherwise=otherwise)
    untrained(*inputs, False).backward(torch.ones_like(out))
    assert asked == [(False, True)]


def test_an_error_in_python_arrives(library: ModuleType, driver: Imagined, monkeypatch: pytest.MonkeyPatch) -> None:
    def otherwise(*_: Any) -> Any:
        raise NotImplementedError("no second derivative")

    inputs = tensors()
    out = called(library, inputs, monkeypatch, otherwise=otherwise)(*inputs, False)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(out, inputs, torch.ones_like(out), create_graph=True)


def test_what_autograd_watches_over(library: ModuleType, driver: Imagined, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tensors()
    run = called(library, inputs, monkeypatch)
    dout = torch.ones(inputs[0].shape).bfloat16()
    out = run(*inputs, False)
    first = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(out, inputs, dout), strict=True))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(out, inputs, dout)
    out = run(*inputs, False)
    with torch.no_grad():
        inputs[1].mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, inputs, dout)
    packed: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> int:
        packed.append(x)
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        out = run(*inputs, False)
    torch.autograd.grad(out, inputs, dout)
    assert len(packed) == 5
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp is not implemented"):
        run(forward_ad.make_dual(inputs[0].detach(), torch.ones_like(inputs[0])), *inputs[1:], False)


def test_a_profiler_sees_the_call(library: ModuleType, driver: Imagined, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tensors()
    run = called(library, inputs, monkeypatch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        run(*inputs, False).backward(torch.ones(inputs[0].shape).bfloat16())
    events = {event.name: event for event in profile.events()}
    assert events["tilewright::attention"].input_shapes == [list(x.shape) for x in inputs]
    assert any("TilewrightAttention" in name for name in events)


def test_gradients_that_lie_otherwise(library: ModuleType, driver: Imagined, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum's gradient repeats along its axes, a slice's has other elements between."""
    inputs = tensors()
    run = called(library, inputs, monkeypatch)
    dout = torch.randn(inputs[0].shape).bfloat16()
    wide = torch.randn(*dout.shape[:3], 2 * dout.shape[3]).bfloat16()
    for laid in (dout, dout[:, :, :1].expand_as(dout), wide[..., ::2], wide[..., 1 : 1 + dout.shape[3]]):
        made = torch.autograd.grad(run(*inputs, False), inputs, laid)
        assert_right(made, torch.autograd.grad(reference(inputs)[0], inputs, laid))


def test_a_thread_has_a_context_before_it_encodes(
    library: ModuleType, driver: Imagined, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = tensors()
    run = called(library, inputs, monkeypatch)
    driver.wants_context = True
    got: list[torch.Tensor] = []

    def work() -> None:
        got.extend(run(*inputs, False) for _ in range(2))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert driver.contexts == [CONTEXT]
    for out in got:
        assert_right((out,), (reference(inputs)[0],))
    assert len(got) == 2


def test_what_the_driver_refuses_is_said(
    library: ModuleType, driver: Imagined, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = tensors()
    run = called(library, inputs, monkeypatch)
    driver.refusals = [700]
    with pytest.raises(RuntimeError, match="refuses a launch of attention: CUDA error 700"):
        run(*inputs, False)


def test_threads_do_not_share_parameters(
    library: ModuleType, driver: Imagined, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = tensors((16, 16))
    run = called(library, inputs, monkeypatch, sink=False)
    several = [tuple((x.detach() + i).requires_grad_() for x in inputs) for i in range(4)]
    got: dict[int, Any] = {}

    def work(i: int) -> None:
        got[i] = [run(*several[i], False) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, outs in got.items():
        want = reference(several[i])[0]  # type: ignore[arg-type]
        for out in outs:
            assert_right((out,), (want,))
