"""What ends a step of a program that knows nothing of the recorder."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.measure.recording.test_recorder import LEAN
from tilewright.measure.recording.plan import Recording, RecordingPlan
from tilewright.measure.recording.recorder import Recorder

X = torch.ones(3, 4)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def two_optimizers() -> Callable[[], object]:
    generator, critic = model(), model()
    rules = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (critic, generator)]

    def step() -> None:
        for rule in rules:
            critic(generator(X)).sum().backward()
            rule.step()

    return step


def one_for_each_layer() -> Callable[[], object]:
    layers = model()
    rules = [torch.optim.SGD([weight], lr=0.1) for weight in layers.parameters()]

    def step() -> None:
        layers(X).sum().backward()
        for rule in rules:
            rule.step()

    return step


def made_anew() -> Callable[[], object]:
    layers = model()

    def step() -> None:
        rule = torch.optim.SGD(layers.parameters(), lr=0.1)
        layers(X).sum().backward()
        rule.step()

    return step


def by_hand() -> Callable[[], object]:
    layers = model()

    def step() -> None:
        layers(X)
        gradients = torch.autograd.grad(layers(X).sum(), list(layers.parameters()))
        with torch.no_grad():
            torch._foreach_add_(list(layers.parameters()), gradients, alpha=-0.1)

    return step


def only_forward() -> Callable[[], object]:
    encoder, decoder = model(), model()

    def step() -> None:
        with torch.no_grad():
            decoder(encoder(X))

    return step


def a_transform_of_each_sample() -> Callable[[], object]:
    transform, classifier = nn.Softmax(-1), model()

    def step() -> None:
        with torch.no_grad():
            classifier(torch.stack([transform(sample) for sample in X]))

    return step


def a_model_that_fails() -> Callable[[], object]:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError

    inner, outer = Fails(), model()

    def step() -> None:
        with torch.no_grad():
            outer(X)
            with pytest.raises(ValueError):
                nn.Sequential(outer[0], inner)(X)

    return step


def recorded(folder: Path, make: Callable[[], Callable[[], object]], steps: int, **options: Any) -> Recording:
    recorder = Recorder(RecordingPlan(wait=4, warmup=1, active=2, detail=LEAN, **options), folder,
                        by_optimizer=True, by_calls=True)  # fmt: skip
    recorder.start()
    step = make()
    for _ in range(steps):
        step()
    return recorder.stop()


def a_jacobian() -> Callable[[], object]:
    layers = model()
    return lambda: torch.autograd.functional.jacobian(layers, X[0])


def a_hessian() -> Callable[[], object]:
    return lambda: torch.autograd.functional.hessian(lambda x: (x**4).sum(), X[0])


def rows_by_hand() -> Callable[[], object]:
    weight = torch.rand(4, 4)

    def step() -> None:
        x = X[0].clone().requires_grad_()
        y = torch.relu(weight @ x)
        for row in y:
            torch.autograd.grad(row, x, retain_graph=True)

    return step


def a_hessian_by_hand() -> Callable[[], object]:
    def step() -> None:
        x = X[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad((x**4).sum(), x, create_graph=True)
        for element in slope:
            torch.autograd.grad(element, x, retain_graph=True)

    return step


def curvature() -> Callable[[], object]:
    layers = model()
    weights = list(layers.parameters())

    def step() -> None:
        slopes = torch.autograd.grad(layers(X).square().sum(), weights, create_graph=True)
        torch.autograd.grad([slope.square().sum() for slope in slopes], weights)

    return step


def two_transforms() -> Callable[[], object]:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x**4).sum()

    def step() -> None:
        torch.func.jacrev(f)(X[0])
        torch.func.vmap(torch.func.grad(f))(X)

    return step


@pytest.mark.parametrize(
    "make",
    [
        two_optimizers, one_for_each_layer, made_anew, by_hand, a_jacobian, a_hessian, rows_by_hand, a_hessian_by_hand,
        curvature, two_transforms,
    ],
)  # fmt: skip
def test_one_thing_ends_each_step(make: Callable[[], Callable[[], object]], tmp_path: Path) -> None:
    done = recorded(tmp_path, make, 12)
    assert (done.steps_seen, done.steps_kept, done.failed) == (12, 2, "")


def beside_an_optimizer() -> Callable[[], object]:
    """Of another model, which is called before it is trained."""
    trained, used = model(), model()
    torch.optim.SGD(trained.parameters(), lr=0.1)

    def step() -> None:
        with torch.no_grad():
            trained(used(X))

    return step


def compiled_in_place() -> Callable[[], object]:
    encoder, decoder = model(), model()
    encoder.compile(backend="eager")
    decoder.compile(backend="eager")

    def step() -> None:
        with torch.no_grad():
            decoder(encoder(X))

    return step


def a_compiled_function_that_leaves_its_region() -> Callable[[], object]:
    layers = model()

    @torch.compiler.disable
    def between(x: torch.Tensor) -> torch.Tensor:
        return layers(x)

    @torch.compile(backend="eager")
    def run(x: torch.Tensor) -> torch.Tensor:
        return between(between(x + 1) * 2)

    return lambda: run(X)


def a_compiled_method() -> Callable[[], object]:
    layers: Any = model()
    run = torch.compile(lambda x: layers(x), backend="eager")
    return lambda: run(X)


@pytest.mark.parametrize("make", [compiled_in_place, a_compiled_function_that_leaves_its_region, a_compiled_method])
def test_a_call_of_a_compiled_function_ends_each_step(make: Callable[[], Callable[[], object]], tmp_path: Path) -> None:
    torch._dynamo.reset()
    done = recorded(tmp_path, make, 12)
    assert (done.steps_seen, done.steps_kept, done.failed) == (12, 2, "")


def compiled_after_three_calls() -> Callable[[], object]:
    layers, calls = model(), iter(range(20))

    def step() -> None:
        if next(calls) == 3:
            layers.compile(backend="eager")
        with torch.no_grad():
            layers(X)

    return step


def traced_after_two_calls() -> Callable[[], object]:
    """The one that is traced is called no more; the other is made, and called, while that is."""
    layers = model()
    traced: list[Any] = []

    def step() -> None:
        with torch.no_grad():
            traced[:] = traced or [torch.jit.trace(layers, X)]
            traced[0](X)

    return step


@pytest.mark.parametrize("make", [compiled_after_three_calls, traced_after_two_calls])
def test_steps_go_on_where_another_module_is_called_from_then_on(
    make: Callable[[], Callable[[], object]], tmp_path: Path
) -> None:
    torch._dynamo.reset()
    done = recorded(tmp_path, make, 16)
    assert 12 <= done.steps_seen <= 16 and (done.steps_kept, done.failed) == (2, "")


@pytest.mark.parametrize("make", [beside_an_optimizer, only_forward, a_transform_of_each_sample, a_model_that_fails])
def test_a_call_of_a_model_ends_each_step_from_its_second_on(
    make: Callable[[], Callable[[], object]], tmp_path: Path
) -> None:
    done = recorded(tmp_path, make, 13)
    assert (done.steps_seen, done.steps_kept, done.failed) == (12, 2, "")


def test_steps_of_a_model_run_without_a_hook_on_any_module(tmp_path: Path) -> None:
    """Another, which nothing has called yet, ends them once it is called instead; copies and files are as without."""
    from torch.nn.modules import module

    first, other = model(), model()
    hooks: list[int] = []

    def step() -> None:
        used = first if len(hooks) < 3 else other
        with torch.no_grad():
            used(X)
        parts = (copy.deepcopy(used), *used.modules())
        hooks.append(len(module._global_forward_hooks) + sum(len(part._forward_hooks) for part in parts))
        assert all(part._compiled_call_impl is None for part in (parts[0], *parts[2:]))
        assert pickle.loads(pickle.dumps(used))._compiled_call_impl is None

    done = recorded(tmp_path, lambda: step, 3 + 14)
    assert (done.steps_seen, done.steps_kept, done.failed) == (12, 2, "")
    # The warm-up and the two kept steps have the hooks of their ranges.
    assert [n for n, count in enumerate(hooks) if count] == [0, 8, 10, 11]
    assert all(part._compiled_call_impl is None for used in (first, other) for part in used.modules())


def test_optimizers_that_follow_each_other_all_end_steps(tmp_path: Path) -> None:
    first, second = made_anew(), two_optimizers()
    seen = iter([first] * 3 + [second] * 9)
    assert recorded(tmp_path, lambda: lambda: next(seen)(), 12).steps_seen == 12


@pytest.mark.parametrize("before", [2, 9])
def test_what_is_only_called_before_a_program_trains_ends_no_step_if_nothing_was_recorded_yet(
    before: int, tmp_path: Path
) -> None:
    """From the sixth call on they are recorded; the training calls its model twice a step, the first call shows it."""
    evaluate = only_forward()
    made: list[Callable[[], object]] = []

    def make() -> Callable[[], object]:
        seen = 0

        def step() -> None:
            nonlocal seen
            seen += 1
            if seen <= before:
                evaluate()
            else:
                made[:] = made or [by_hand()]
                made[0]()

        return step

    done = recorded(tmp_path, make, before + 12)
    assert done.steps_seen == (12 if before == 2 else 8 + 2 * (12 - 1))


def test_a_program_that_has_an_optimizer_has_no_hook_on_its_models(tmp_path: Path) -> None:
    from torch.nn.modules import module

    counts: list[int] = []

    def make() -> Callable[[], object]:
        counts.append(len(module._global_forward_hooks))
        step = made_anew()

        def counting() -> None:
            step()
            counts.append(len(module._global_forward_hooks))

        return counting

    assert recorded(tmp_path, make, 3).steps_seen == 3
    assert counts == [1, 0, 0, 0]
