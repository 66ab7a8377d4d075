"""An operator with a recipe, called eagerly and as a step of a compiled graph, on a driver that calls Python functions.

`imaginary::sums(x, y)` is x + y, or x + x without y, and x + x, of 12 numbers.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.backend.compiling import compiled
from tests.launch.driver import FakeDriver, adder
from tilewright.backend import recording
from tilewright.kernels import by_recipe
from tilewright.launch import builder, driver, twin
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe
from tilewright.runtime import assemble
from tilewright.runtime.executable import CallStep, Executable

CPU = torch.device("cpu")
NAME = "imaginary::sums"
kernels: list[Any] = []
calls: list[str] = []
"""The calls that ran in Python."""
_library = torch.library.Library("imaginary", "FRAGMENT")
_library.define("sums(Tensor x, Tensor? y, str how='kernel') -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))


def recipe(call: RecipeBuilder, x: Operand, y: Operand | None, how: str) -> Recipe | None:
    calls.append("built")
    if how == "formula":
        return None
    first, second = call.empty(x.shape, x.dtype), call.empty(x.shape, x.dtype)
    call.launch(kernels[-1], (3,), x, y or x, first)
    call.launch(kernels[-1], (5,), x, x, second)
    return call.finish(first, second)


def formula(x: torch.Tensor, y: torch.Tensor | None, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    calls.append("formula")
    return x + (x if y is None else y), x + x


def implementation(*arguments: Any) -> Any:
    return by_recipe.performed(NAME, recipe, *arguments) or formula(*arguments)


@torch.library.impl(_library, "sums", "CompositeExplicitAutograd")  # type: ignore[untyped-decorator]
def _sums(x: torch.Tensor, y: torch.Tensor | None, how: str = "kernel") -> Any:
    calls.append("python")
    return implementation(x, y, how)


torch.library.register_fake(NAME, lambda x, y, how="kernel": (x.new_empty(x.shape), x.new_empty(x.shape)), lib=_library)
sums: Any = torch.ops.imaginary.sums


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, executor: None) -> Iterator[FakeDriver]:
    made = FakeDriver()
    kernels.append(made.kernel("add", 3, adder(12)))
    monkeypatch.setattr(driver, "table", lambda device: made.table)
    twin._calls.cache_clear()
    by_recipe._built.cache_clear()
    monkeypatch.setitem(by_recipe.RECIPES, NAME, recipe)
    # The graphs of these tests are on a CPU, whose allocator begins at multiples of 64 bytes, not of 128.
    monkeypatch.setattr(assemble._Assembler, "_device", lambda self: CPU)
    for module in (builder, assemble):
        monkeypatch.setattr(module, "LINE", 64)
    calls.clear()
    yield made
    twin._calls.cache_clear()


def compiled_with(function: Any, *inputs: torch.Tensor) -> tuple[Any, Executable]:
    """`function` compiled, called once, and its only executable."""
    with recording() as record:
        made = compiled(function)
        made(*inputs)
    (executable,) = [graph.executable for graph in record.graphs if graph.executable]
    return made, executable


def drawn() -> torch.Tensor:
    return torch.randn(3, 4)


@pytest.mark.parametrize("by", ["native", "python"])
def test_a_step_of_a_compiled_graph(fake: FakeDriver, by: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = sums(x, y)
        return sums(torch.relu(first) - second, None)[0] * 2

    x, y = drawn(), drawn()
    mine, executable = compiled_with(function, x, y)
    assert sum(isinstance(step, CallStep) and step.recipe is not None for step in executable.steps) == 2
    if by == "python":
        executable.native = None
    fake.launches.clear()
    calls.clear()
    x, y = drawn(), drawn()
    torch.testing.assert_close(mine(x, y), 4 * (torch.relu(x + y) - 2 * x))
    assert len(fake.launches) == 4
    assert calls.count("python") == (0 if by == "native" else 2)


def test_one_tensor_twice_and_results_that_nobody_takes(fake: FakeDriver) -> None:
    x = drawn()
    mine, _ = compiled_with(lambda x: sums(x, x)[1] + 1, x)
    fake.launches.clear()
    calls.clear()
    torch.testing.assert_close(mine(x), 2 * x + 1)
    assert len(fake.launches) == 2 and calls == []


def test_a_profiler_sees_the_operator(fake: FakeDriver) -> None:
    x = drawn()
    mine, _ = compiled_with(lambda x: sums(x, None)[0] + 1, x)
    calls.clear()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True) as profile:
        mine(x)
    (event,) = [event for event in profile.events() if event.name == NAME]
    # x, no y, and a word.
    assert event.input_shapes == [[3, 4], [], []] and calls == []


def test_other_addresses_go_by_python(fake: FakeDriver) -> None:
    x = drawn()
    mine, _ = compiled_with(lambda x: sums(x, None)[0] + 1, x)
    elsewhere = torch.randn(13)[1:].view(3, 4)
    calls.clear()
    torch.testing.assert_close(mine(elsewhere), 2 * elsewhere + 1)
    assert "python" in calls


def test_a_slice_is_expected_where_it_begins(fake: FakeDriver) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return sums(x[1:], None)[0] + 1

    x = torch.randn(4, 4)
    mine, _ = compiled_with(function, x)
    calls.clear()
    torch.testing.assert_close(mine(x), 2 * x[1:] + 1)
    assert calls == []


def test_a_call_without_a_recipe_stays_a_call(fake: FakeDriver) -> None:
    x = drawn()
    mine, executable = compiled_with(lambda x: sums(x, None, "formula")[0] + 1, x)
    assert not any(isinstance(step, CallStep) and step.recipe is not None for step in executable.steps)
    torch.testing.assert_close(mine(x), 2 * x + 1)
    assert fake.launches == []


def test_arguments_must_fit_the_signature() -> None:
    call = RecipeBuilder("sums", builder.operands_of([drawn()]), compiled=False)
    with pytest.raises(ValueError, match="2 arguments for a kernel of the signature PPP"):
        call.launch(kernels[-1], (1,), *[call.inputs[0]] * 2)
