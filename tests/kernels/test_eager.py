"""Operators called eagerly: the same results and refusals by PyTorch's dispatcher, in Python, and repeated in C++."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels import imagined
from tests.kernels.imagined import ADD, CONTEXT, SCALE, Imagined
from tilewright import functional
from tilewright.kernels import linear, repeat
from tilewright.kernels.repeat import EXTENSION

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def library() -> ModuleType:
    return EXTENSION.load(EXTENSION.built())


def forget(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """What C++ knows of an operator."""
    way = next(cell.cell_contents for cell in call.__closure__ or () if hasattr(cell.cell_contents, "repeats"))
    for name in ("_call", "_below", "_known"):
        monkeypatch.setattr(way, name, None)


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Imagined]:
    made = Imagined()
    monkeypatch.setattr(repeat, "driver_of", lambda device: made.table)
    # PyTorch's allocator on a CPU begins anywhere at 64 bytes, that of a GPU at 512.
    monkeypatch.setattr(repeat, "LINE", 64)
    # Whatever one test's calls were found to be is no other's.
    for call in (imagined.scaled, imagined.scaled_backward):
        forget(call, monkeypatch)
    imagined.calls.clear()
    yield made
    imagined.calls.clear()


@pytest.fixture(params=["python", "native"])
def scaled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Call:
    if request.param == "native":
        monkeypatch.setattr(EXTENSION, "found", request.getfixturevalue("library"))
    return lambda x, bias=None, by=2.0, how="": imagined.scaled(x, bias, by, how)


@pytest.fixture
def native(library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setattr(EXTENSION, "found", library)
    return lambda x, bias=None, by=2.0, how="": imagined.scaled(x, bias, by, how)


def drawn(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape).requires_grad_(grad)


def taught(call: Call, inputs: Sequence[Any]) -> None:
    """So many calls of a kind, that the next is one of those that C++ does alone."""
    for _ in range(2):
        call(*inputs)
    imagined.calls.clear()


def test_the_third_call_of_a_kind_is_repeated(native: Call, driver: Imagined) -> None:
    for bias in (False, True):
        for turn in range(5):
            x, b = drawn(3, 5), drawn(3, 5)
            imagined.calls.clear()
            driver.launches.clear()
            y = native(x, b if bias else None)
            torch.testing.assert_close(y, 2 * x + b if bias else 2 * x)
            in_python = turn < 2
            assert imagined.calls == (["scaled"] if in_python else [])
            assert driver.launches == ([] if in_python else [SCALE, ADD] if bias else [SCALE])
            assert y.is_contiguous() and not y.requires_grad


def test_kinds_are_told_apart(native: Call, driver: Imagined) -> None:
    wide = torch.randn(64)
    assert wide.data_ptr() % 64 == 0
    inputs: list[tuple[torch.Tensor, float]] = [
        (wide[:6].view(2, 3), 2.0),
        (wide[:6].view(3, 2), 2.0),
        (wide[:6], 2.0),
        (wide[1:7].view(2, 3), 2.0),
        (wide[:6].view(2, 3), 3.0),
        (wide[:6].view(2, 3), float("inf")),
        (torch.empty(0, 3), 2.0),
        (torch.tensor(1.5), 2.0),
    ]
    for _ in range(5):
        for x, by in inputs:
            y = native(x, by=by)
            assert y.shape == x.shape
            torch.testing.assert_close(y, by * x, equal_nan=True)
    assert len(driver.launches) >= len(inputs)


def test_one_tensor_twice(native: Call) -> None:
    x = drawn(4)
    for _ in range(4):
        torch.testing.assert_close(native(x, x), 3 * x)
    one, other = drawn(4), drawn(4)
    taught(native, (one, other))
    torch.testing.assert_close(native(one, other), 2 * one + other)
    torch.testing.assert_close(native(x, x), 3 * x)
    assert imagined.calls == []


@pytest.mark.parametrize("how", ["copied", "hidden"])
def test_what_also_does_something_else_stays_in_python(how: str, native: Call, driver: Imagined) -> None:
    for _ in range(5):
        x, b = drawn(7), drawn(7)
        torch.testing.assert_close(native(x, b, how=how), 2 * x + b)
    assert imagined.calls == ["scaled"] * 5 and driver.launches == []


def test_gradients(scaled: Call, driver: Imagined) -> None:
    for _ in range(5):
        x, dy = drawn(3, 5, grad=True), drawn(3, 5)
        y = scaled(x)
        torch.testing.assert_close(y.detach(), 2 * x.detach())
        for _ in range(2):
            (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
            torch.testing.assert_close(dx, 2 * dy)
        # Of a sum: no stride, which is another kind of call.
        (dx,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(dx, torch.full_like(dx, 2))
        with pytest.raises(RuntimeError, match="a second time"):
            torch.autograd.grad(y, x, dy)
        assert y.add_(1).requires_grad  # a result of its own, not a view of something
    with torch.no_grad():
        assert not scaled(drawn(2, grad=True)).requires_grad
    with torch.inference_mode():
        assert scaled(drawn(2, grad=True)).is_inference()
    assert scaled(torch.nn.Parameter(drawn(2))).requires_grad


def test_a_gradient_is_computed_without_python(native: Call, driver: Imagined) -> None:
    for _ in range(4):
        x, dy = drawn(3, 5, grad=True), drawn(3, 5)
        driver.launches.clear()
        imagined.calls.clear()
        torch.testing.assert_close(torch.autograd.grad(native(x), x, dy)[0], 2 * dy)
    assert imagined.calls == [] and driver.launches == [SCALE, SCALE]


def test_what_is_switched_off_does_not_watch(native: Call, driver: Imagined) -> None:
    # As on the threads of autograd's engine, which have switched off the names of dimensions.
    off = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    x = drawn(3)
    with torch._C._ExcludeDispatchKeyGuard(off):
        taught(native, (x,))
        torch.testing.assert_close(native(x), 2 * x)
    assert imagined.calls == [] and driver.launches == [SCALE]


def test_what_autograd_watches_over(scaled: Call) -> None:
    x, dy = drawn(4, grad=True), drawn(4)
    for _ in range(4):
        y = scaled(x)
        with torch.no_grad():
            x.mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y, x, dy)
        packed: list[torch.Tensor] = []

        def pack(saved: torch.Tensor, packed: list[torch.Tensor] = packed) -> int:
            packed.append(saved)
            return len(packed) - 1

        with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
            y = scaled(x)
        torch.autograd.grad(y, x, dy)
        assert len(packed) == 1
        (dx,) = torch.autograd.grad(scaled(x), x, dy.clone().requires_grad_(), create_graph=True)
        with pytest.raises(NotImplementedError, match="scaled_backward has no second derivative"):
            dx.sum().backward()


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    pass


def test_who_watches_sees_the_operator(scaled: Call) -> None:
    x = drawn(4, grad=True)
    for _ in range(4):
        with Seen() as seen:
            scaled(x)
        assert "imagined::scaled" in seen.names
        with SeenFunctions() as functions:
            scaled(x)
        assert "imagined.scaled.default" in functions.names
        assert type(scaled(drawn(4).as_subclass(Own))) is Own
        graph = make_fx(lambda x: scaled(x))(drawn(4))
        assert torch.ops.imagined.scaled.default in [node.target for node in graph.graph.nodes]
        traced = torch.jit.trace(lambda x: scaled(x), (drawn(4),), check_trace=False)
        assert "imagined::scaled" in str(traced.graph)
        scaled(x)


def test_transforms(scaled: Call) -> None:
    x = drawn(3, 4)
    for _ in range(4):
        # As `torch.library` refuses it, of operators whose gradient is in Python.
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.grad(lambda x: scaled(x).sum())(x)
        torch.testing.assert_close(torch.vmap(lambda x: scaled(x))(x), 2 * x)
        scaled(x)
    # Of a view that a flag makes negative the memory has another sign.
    negative = torch._neg_view(x)
    for _ in range(4):
        torch.testing.assert_close(scaled(negative), 2 * negative)


def test_forward_mode_goes_by_the_operator(scaled: Call) -> None:
    x = drawn(3)
    for _ in range(3):
        scaled(x)
    with forward_mode.dual_level(), Seen() as seen:
        scaled(x)
    assert "imagined::scaled" in seen.names


def test_compiled_as_one_graph(scaled: Call) -> None:
    x = drawn(3, 4, grad=True)
    for _ in range(3):
        scaled(x)
    compiled = torch.compile(lambda x: scaled(x + 1).sum(), backend="aot_eager", fullgraph=True)
    (dx,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(dx, torch.full_like(x, 2))


def test_a_profiler_sees_the_operator(scaled: Call) -> None:
    x, dy = drawn(3, 4, grad=True), drawn(3, 4)
    for _ in range(4):
        scaled(x).backward(dy)
        scaled(x.detach())
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        scaled(x).backward(dy)
        scaled(x.detach())
    events = [event for event in profile.events() if event.name == "imagined::scaled"]
    assert [event.input_shapes[0] for event in events] == [[3, 4]] * len(events) and len(events) >= 2
    assert "imagined::scaled_backward" in [event.name for event in profile.events()]


def test_a_profiler_sees_what_python_runs_and_autograd_records(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EXTENSION, "found", library)
    forget(linear._gelu, monkeypatch)
    x, weight = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    for _ in range(2):
        functional.linear_gelu(x, weight)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        functional.linear_gelu(x, weight)
    assert "tilewright::linear_gelu" in {event.name for event in profile.events()}


def test_below_autograd_nothing_is_recorded(scaled: Call) -> None:
    x = drawn(3, grad=True)
    for _ in range(4):
        with torch._C._AutoDispatchBelowAutograd():
            assert not scaled(x).requires_grad
        assert scaled(x).requires_grad


def test_what_the_driver_refuses_is_said(native: Call, driver: Imagined) -> None:
    x = drawn(3)
    taught(native, (x,))
    driver.refusals = [700]
    with pytest.raises(RuntimeError, match="refuses a launch of a kernel: CUDA error 700"):
        native(x)
    driver.refusals = [201]
    torch.testing.assert_close(native(x), 2 * x)
    assert driver.contexts == [CONTEXT]


def test_threads(native: Call) -> None:
    several = [drawn(9, grad=True) for _ in range(4)]
    got: dict[int, Any] = {}

    def work(i: int) -> None:
        x = several[i]
        got[i] = [torch.autograd.grad(native(x, by=float(i)), x, x.detach())[0] for _ in range(30)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, gradients in got.items():
        for dx in gradients:
            torch.testing.assert_close(dx, i * several[i].detach())
    assert len(got) == 4


def test_many_kinds_are_forgotten_and_found_again(native: Call) -> None:
    x = drawn(1)
    for by in range(5000):
        assert native(x, by=float(by)).item() == pytest.approx(by * x.item())
    taught(native, (x,))
    assert native(x).item() == pytest.approx(2 * x.item()) and imagined.calls == []
