"""Own operators called eagerly, by the executor and in Python: the dispatcher's results, and who sees a call."""

from functools import partial
from math import prod
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
from torch._dynamo import compiled_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.launch.driver import CONTEXT, INVALID_CONTEXT, REFUSED, FakeDriver
from tests.launch.scaled import Scaled
from tests.waiting import in_threads
from tilewright.launch.executor import EXTENSION


@pytest.fixture(params=["native", "native, gradient in Python", "python"])
def scaled(request: pytest.FixtureRequest, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Scaled:
    found = None if request.param == "python" else request.getfixturevalue("module")
    monkeypatch.setattr(EXTENSION, "found", found)
    return Scaled(fake, is_plain="Python" not in request.param)


@pytest.fixture
def native(module: ModuleType, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Scaled:
    monkeypatch.setattr(EXTENSION, "found", module)
    return Scaled(fake)


def drawn(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape).requires_grad_(grad)


def names(fake: FakeDriver) -> list[str]:
    return [name for name, *_ in fake.launches]


# ------------------------------------------------------------------------------------------- kinds of calls


def test_every_call_takes_the_same_road(native: Scaled, fake: FakeDriver) -> None:
    keep = []
    for bias in (False, True):
        for _ in range(3):
            fake.launches.clear()
            x, b = drawn(64), drawn(64)
            keep += [x, b]
            y = native(x, b if bias else None)
            torch.testing.assert_close(y, 2 * x + b if bias else 2 * x)
            assert names(fake) == (["scale", "add"] if bias else ["scale"])
            assert y.is_contiguous() and not y.requires_grad
    assert native.without_recipe == []


def test_kinds_are_told_apart(scaled: Scaled) -> None:
    wide = torch.randn(128)
    inputs: list[tuple[torch.Tensor, float]] = [
        (wide[:6].view(2, 3), 2.0),
        (wide[:6].view(3, 2), 2.0),
        (wide[:6].view(2, 3).t(), 2.0),
        (wide[:6], 2.0),
        (wide[1:7].view(2, 3), 2.0),
        (wide[:6].view(2, 3), 3.0),
        (wide[:6].view(2, 3), float("inf")),
        (wide[:6].view(2, 3), -0.0),
        (wide[:6].view(2, 3), 0.0),
        (torch.empty(0, 3), 2.0),
        (torch.tensor(1.5), 2.0),
    ]
    for _ in range(3):
        for x, by in inputs:
            y = scaled(x, by=by)
            assert y.shape == x.shape and y.is_contiguous()
            torch.testing.assert_close(y, by * x, equal_nan=True)
            assert torch.equal(torch.signbit(y), torch.signbit(by * x))


def test_a_recipe_is_built_once_for_a_kind(native: Scaled) -> None:
    x, other = torch.randn(512).split(256)
    assert x.data_ptr() % 128 == other.data_ptr() % 128
    for _ in range(3):
        native(x)
        native(other)
        native(x[1:9])
        native(x[33:41])
    assert native.built == ["scaled"] * 2
    native(x, by=3.0)
    native(x[2:10])
    native(x, other)
    native(x, other[1:].as_strided((256,), (0,)))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        native(x)
    finally:
        torch.set_float32_matmul_precision(before)
    assert native.built == ["scaled"] * 7


def test_a_known_kind_alone_is_called_unchecked(native: Scaled, fake: FakeDriver) -> None:
    x = drawn(3, grad=True)
    known = native.forward.known
    assert known(x, None, 2.0, "") is None and native.built == []
    native(x)
    fake.launches.clear()
    y = known(x, None, 2.0, "")
    torch.testing.assert_close(y, 2 * x)
    assert names(fake) == ["scale"] and y.requires_grad
    assert known(x, None, 3.0, "") is None and known(drawn(4), None, 2.0, "") is None
    with Seen():
        assert known(x, None, 2.0, "") is None
    assert native.built == ["scaled"] and names(fake) == ["scale"]


def test_numbers_of_two_types_are_two_kinds(native: Scaled) -> None:
    x = drawn(4)
    for by in (1, 1.0, True, 1, 1.0, True):
        torch.testing.assert_close(native(x, by=by), x)
    assert native.built == ["scaled"] * 3


def test_integers_are_part_of_a_kind(native: Scaled) -> None:
    x = drawn(4)
    for _ in range(2):
        for by in ([2, 3], (2, 3), [3, 2], [7], []):
            torch.testing.assert_close(native(x, by=by), prod(by) * x)
    assert native.built == ["scaled"] * 4 and native.without_recipe == []


def test_what_no_key_has_goes_by_the_dispatcher(native: Scaled, fake: FakeDriver) -> None:
    class Factor(float):
        pass

    x = drawn(4)
    torch.testing.assert_close(native(x, by=Factor(3.0)), 3 * x)
    # Below the dispatcher Python finds the recipe.
    torch.testing.assert_close(native.forward.below(x, None, Factor(3.0), ""), 3 * x)
    assert names(fake) == ["scale"] * 2 and native.without_recipe == []
    with pytest.raises(RuntimeError, match="Expected a value of type"):
        native(x, by=[3.0])  # type: ignore[arg-type]


def test_one_tensor_twice(scaled: Scaled) -> None:
    x, other = drawn(4), drawn(4)
    torch.testing.assert_close(scaled(x, other), 2 * x + other)
    torch.testing.assert_close(scaled(x, x), 3 * x)


def test_many_kinds_are_forgotten_and_found_again(native: Scaled) -> None:
    x = drawn(1)
    for by in range(4200):
        assert native(x, by=float(by)).item() == pytest.approx(by * x.item())
    native.built.clear()
    assert native(x, by=4199.0).item() == pytest.approx(4199 * x.item()) and native.built == []
    assert native(x, by=1.0).item() == pytest.approx(x.item()) and native.built == ["scaled"]


def test_without_a_recipe_pytorch_computes(scaled: Scaled) -> None:
    x = drawn(3, grad=True)
    for _ in range(2):
        (dx,) = torch.autograd.grad(scaled(x, how="refused"), x, torch.ones(3))
        torch.testing.assert_close(dx, torch.full((3,), 2.0))
        torch.testing.assert_close(scaled(x.detach(), how="refused"), 2 * x.detach())
    assert scaled.without_recipe == ["refused"] * 4


def test_a_captured_graph_draws_anew(native: Scaled, fake: FakeDriver) -> None:
    fake.is_capturing = True
    x = drawn(3)
    torch.testing.assert_close(native(x, how="drawn"), 2 * x)
    assert native.without_recipe == ["drawn"] and fake.launches == []


# ------------------------------------------------------------------------------------------- autograd


def test_gradients(scaled: Scaled, fake: FakeDriver) -> None:
    for _ in range(2):
        fake.launches.clear()
        x, dy = drawn(3, 5, grad=True), drawn(3, 5)
        y = scaled(x)
        torch.testing.assert_close(y.detach(), 2 * x.detach())
        for _ in range(2):
            (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
            torch.testing.assert_close(dx, 2 * dy)
        assert names(fake) == ["scale"] * 3
        # The gradient of a sum has no stride.
        (dx,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(dx, torch.full_like(dx, 2))
        with pytest.raises(RuntimeError, match="a second time"):
            torch.autograd.grad(y, x, dy)
        assert y.add_(1).requires_grad  # a result of its own, not a view
    with torch.no_grad():
        assert not scaled(drawn(2, grad=True)).requires_grad
    with torch.inference_mode():
        assert scaled(drawn(2, grad=True)).is_inference()
    assert scaled(torch.nn.Parameter(drawn(2))).requires_grad
    assert scaled.without_recipe == []


def test_what_autograd_watches_over(scaled: Scaled) -> None:
    x, dy = drawn(4, grad=True), drawn(4)
    y = scaled(x)
    with torch.no_grad():
        x.mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x, dy)
    packed: list[torch.Tensor] = []

    def pack(saved: torch.Tensor) -> int:
        packed.append(saved)
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        y = scaled(x)
    torch.autograd.grad(y, x, dy)
    assert len(packed) == 1
    (dx,) = torch.autograd.grad(scaled(x), x, dy.clone().requires_grad_(), create_graph=True)
    with pytest.raises(NotImplementedError, match="scaled_backward has no second derivative"):
        dx.sum().backward()


def test_below_autograd_nothing_is_recorded(scaled: Scaled) -> None:
    x = drawn(3, grad=True)
    with torch._C._AutoDispatchBelowAutograd():
        assert not scaled(x).requires_grad
    assert scaled(x).requires_grad


# ------------------------------------------------------------------------------------------- who sees a call


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


def test_observers_see_the_operator(scaled: Scaled) -> None:
    x = drawn(4, grad=True)
    for _ in range(2):
        with Seen() as seen:
            scaled(x)
        assert "tested::scaled" in seen.names
        with SeenFunctions() as functions:
            scaled(x)
        assert "tested.scaled.default" in functions.names
        assert type(scaled(drawn(4).as_subclass(Own))) is Own
        graph = make_fx(lambda x: scaled(x))(drawn(4))
        assert torch.ops.tested.scaled.default in [node.target for node in graph.graph.nodes]
        traced = torch.jit.trace(lambda x: scaled(x), (drawn(4),), check_trace=False)
        assert "tested::scaled" in str(traced.graph)
        with forward_mode.dual_level(), Seen() as seen:
            scaled(x)
        assert "tested::scaled" in seen.names
        scaled(x)


def test_transforms_and_negative_views(scaled: Scaled) -> None:
    x = drawn(3, 4)
    for _ in range(2):
        # `torch.library` refuses operators whose gradient is written in Python.
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.grad(lambda x: scaled(x).sum())(x)
        torch.testing.assert_close(torch.vmap(lambda x: scaled(x))(x), 2 * x)
        negative = torch._neg_view(x)
        torch.testing.assert_close(scaled(negative), 2 * negative)
        scaled(x)


def test_compiled_as_one_graph(scaled: Scaled) -> None:
    x = drawn(3, 4, grad=True)
    scaled(x)
    compiled = torch.compile(lambda x: scaled(x + 1).sum(), backend="aot_eager", fullgraph=True)
    (dx,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(dx, torch.full_like(x, 2))


def test_compiled_autograd_takes_the_node_that_python_has(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EXTENSION, "found", None)
    x = drawn(3, 4, grad=True)
    y = Scaled(fake)(x)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(x, 2))


def test_keys_that_are_switched_off_do_not_observe(native: Scaled, fake: FakeDriver) -> None:
    # As on the threads of autograd's engine, which have switched off the names of dimensions.
    off = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    x = drawn(3)
    with torch._C._ExcludeDispatchKeyGuard(off):
        torch.testing.assert_close(native(x), 2 * x)
    assert names(fake) == ["scale"]


@pytest.mark.parametrize("how", ["", "refused"])
def test_a_profiler_sees_the_operator(how: str, scaled: Scaled) -> None:
    x, dy = drawn(3, 4, grad=True), drawn(3, 4)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True) as profile:
        scaled(x, how=how).backward(dy)
        scaled(x.detach(), how=how)
    events = [event for event in profile.events() if event.name == "tested::scaled"]
    assert len(events) == 2 and [event.input_shapes[0] for event in events] == [[3, 4]] * 2
    assert "tested::scaled_backward" in [event.name for event in profile.events()]


# ------------------------------------------------------------------------------------------- driver and threads


def test_what_the_driver_refuses_is_said(native: Scaled, fake: FakeDriver) -> None:
    x = drawn(3)
    fake.refusals = [REFUSED]
    with pytest.raises(RuntimeError, match="tested::scaled: the driver refuses a launch: CUDA error 700"):
        native(x)
    fake.refusals = [INVALID_CONTEXT]
    torch.testing.assert_close(native(x), 2 * x)
    assert fake.contexts == [CONTEXT]


def test_threads(native: Scaled) -> None:
    several = [drawn(9, grad=True) for _ in range(4)]
    got: dict[int, Any] = {}

    def work(i: int) -> None:
        x = several[i]
        got[i] = [torch.autograd.grad(native(x, by=float(i)), x, x.detach())[0] for _ in range(30)]

    in_threads([partial(work, i) for i in range(4)])
    for i, gradients in got.items():
        for dx in gradients:
            torch.testing.assert_close(dx, i * several[i].detach())
    assert len(got) == 4
