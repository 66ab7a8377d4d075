"""Recipes and programs, by the executor in C++ and by its Python twin, on a driver that calls Python functions."""

import ctypes
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.launch.driver import CONTEXT, INVALID_CONTEXT, REFUSED, FakeDriver, adder, floats_at, word_at
from tilewright.launch import executor, twin
from tilewright.launch.executor import native_recipe
from tilewright.records.errors import CompilerError
from tilewright.records.recipe import (
    Argument,
    Copy,
    Fill,
    Launch,
    Layout,
    Number,
    Offset,
    Pointer,
    Recipe,
    Structure,
    TensorMap,
)

CPU = torch.device("cpu")
RECIPE, CALL, VIEW, CONSTANT, PYTHON = range(5)
Performed = Callable[[Recipe, Sequence[torch.Tensor]], Sequence[torch.Tensor]]


def layout(*shape: int, dtype: torch.dtype = torch.float32, strides: tuple[int, ...] | None = None) -> Layout:
    return Layout(shape, strides or torch.empty(shape, device="meta").stride(), dtype, CPU)


def recipe_of(
    buffers: Sequence[Layout], results: Sequence[int], *actions: Launch | Copy | Fill, inputs: int = 1
) -> Recipe:
    return Recipe("made", CPU, (0,) * inputs, 4, tuple(buffers), tuple(results), actions)


@pytest.fixture(params=["native", "twin"])
def perform(request: pytest.FixtureRequest, module: ModuleType) -> Performed:
    if request.param == "twin":
        return twin.perform

    def run(recipe: Recipe, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        places = range(len(inputs), len(inputs) + len(recipe.results))
        detail = native_recipe(module, recipe), list(range(len(inputs))), [(p, -1) for p in places], None
        program = module.program(
            (
                CPU,
                None,
                places.stop,
                [(i, None) for i in range(len(inputs))],
                [(RECIPE, "made", [], detail)],
                [(p, None) for p in places],
            )
        )
        results: Sequence[torch.Tensor] = module.run(program, list(inputs))
        return results

    return run


def test_a_launch_gets_its_shape_and_its_arguments(fake: FakeDriver, perform: Performed) -> None:
    add = fake.kernel("add", 3, adder(12), threads=64, shared_bytes=16)
    transposed = layout(3, 4, strides=(1, 3))
    recipe = recipe_of([transposed], [0], Launch(add, (5, 2, 1), (Pointer(0), Pointer(1), Pointer(2))), inputs=2)
    (z,) = perform(recipe, [torch.arange(12.0), torch.ones(12)])
    assert fake.launches == [("add", (5, 2, 1), 64, 16)]
    assert z.stride() == (1, 3)
    assert torch.equal(z.as_strided((12,), (1,)), torch.arange(12.0) + 1)


def test_numbers_and_offsets_arrive_as_they_are(fake: FakeDriver, perform: Performed) -> None:
    seen: list[Any] = []

    def look(*places: int) -> None:
        seen.extend(kind.from_address(place).value for kind, place in zip(kinds, places, strict=True))

    kinds = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_double, ctypes.c_uint64
    numbers: tuple[Argument, ...] = (
        Number("i", -7), Number("q", -(2**40)), Number("f", 0.5), Number("d", 0.1), Pointer(0, 8)
    )  # fmt: skip
    x = torch.arange(4.0)
    perform(recipe_of([], [], Launch(fake.kernel("look", 5, look), (1, 1, 1), numbers)), [x])
    assert seen == [-7, -(2**40), 0.5, 0.1, x.data_ptr() + 8]


def test_scratch_copies_and_fills(fake: FakeDriver, perform: Performed) -> None:
    add = fake.kernel("add", 3, adder(6))
    # tensors: x, then scratch, ones, result
    recipe = recipe_of(
        [layout(2, 3), layout(6), layout(6)], [2],
        Copy(1, 0), Fill(2, 1.0), Launch(add, (1, 1, 1), (Pointer(1), Pointer(2), Pointer(3))),
    )  # fmt: skip
    x = torch.arange(6.0).view(3, 2).T
    (y,) = perform(recipe, [x])
    assert torch.equal(y, x.reshape(-1) + 1)


def test_a_part_of_a_buffer_is_filled(perform: Performed) -> None:
    whole, columns = layout(3, 5), layout(3, 2, strides=(5, 1))
    (y,) = perform(recipe_of([whole], [0], Fill(1, 1.0), Fill(1, -2.0, columns, 3)), [torch.zeros(1)])
    assert torch.equal(y, torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0]).expand(3, 5))


def test_structures_hold_addresses(fake: FakeDriver, perform: Performed) -> None:
    found: list[int] = []

    def look(place: int) -> None:
        found.extend((ctypes.c_uint64 * 3).from_address(place))

    # A recipe that draws nothing has the offset 0.
    structure = Structure(bytes(range(24)), ((8, Pointer(0, 4)), (16, Offset())))
    x = torch.zeros(4)
    perform(recipe_of([], [], Launch(fake.kernel("look", 1, look), (1, 1, 1), (structure,))), [x])
    first, middle, last = found
    assert (first, last) == (int.from_bytes(bytes(range(8)), "little"), 0)
    assert middle == x.data_ptr() + 4


def test_tensor_maps_are_encoded_in_the_context(fake: FakeDriver, perform: Performed) -> None:
    found: list[int] = []
    map_of, matrix = TensorMap(0, 9, (64, 3, 2, 1), (128, 384, 768), (64, 64, 1, 1), 3, 3), ((64, 3), (128,), (64, 2))
    x = torch.zeros(8)

    def look(*places: int) -> None:
        assert not any(place % 64 for place in places) and fake.contexts == [CONTEXT]
        found.extend(ctypes.c_uint8.from_address(place).value for place in places)

    look = fake.kernel("look", 2, look)
    perform(recipe_of([], [], Launch(look, (1, 1, 1), (map_of, TensorMap(0, 9, *matrix, 3, 3)))), [x])
    assert fake.maps == [(9, x.data_ptr(), *map_of[2:5]), (9, x.data_ptr(), *matrix)] and found == [1, 2]


def test_a_refused_launch_is_an_error(fake: FakeDriver, perform: Performed) -> None:
    add = fake.kernel("add", 3, adder(4))
    recipe = recipe_of([layout(4)], [0], Launch(add, (1, 1, 1), (Pointer(0), Pointer(0), Pointer(1))))
    fake.refusals = [REFUSED]
    with pytest.raises((RuntimeError, CompilerError), match="made: the driver refuses a launch: CUDA error 700"):
        perform(recipe, [torch.ones(4)])


# ------------------------------------------------------------------------------------------------- programs


def program(module: ModuleType, slots: int, inputs: Sequence[Any], steps: Sequence[Any], outputs: Sequence[int]) -> Any:
    return module.program((CPU, None, slots, inputs, steps, [(slot, None) for slot in outputs]))


def called(
    name: str, operands: Sequence[Any], result: tuple[int, Any], overload: str = "Tensor", frees: Sequence[int] = ()
) -> Any:
    return CALL, name, list(frees), (f"aten::{name}", overload, list(operands), [(0, *result)])


def test_a_thread_without_a_context_gets_one(fake: FakeDriver, module: ModuleType) -> None:
    add = fake.kernel("add", 3, adder(4))
    made = recipe_of([layout(4)], [0], Launch(add, (1, 1, 1), (Pointer(0), Pointer(0), Pointer(1))))
    step = RECIPE, "made", [], (native_recipe(module, made), [0], [(1, -1)], None)
    fake.refusals = [INVALID_CONTEXT]
    (y,) = module.run(program(module, 2, [(0, None)], [step], [1]), [torch.ones(4)])
    assert fake.contexts == [CONTEXT] and torch.equal(y, torch.full((4,), 2.0))


def test_memory_is_taken_over(fake: FakeDriver, module: ModuleType) -> None:
    add = fake.kernel("add", 3, adder(12))
    made = recipe_of([layout(3, 4)], [0], Launch(add, (1, 1, 1), (Pointer(0), Pointer(0), Pointer(1))))
    step = RECIPE, "made", [], (native_recipe(module, made), [0], [(1, 0)], None)
    run = program(module, 2, [(0, None)], [step], [1])
    given = [torch.arange(12.0)]
    address = given[0].data_ptr()
    (y,) = module.run(run, given)
    assert y.data_ptr() == address and y.shape == (3, 4) and not y._is_view()


@pytest.mark.parametrize("hold", [lambda x: x, lambda x: x[1:], lambda x: x.untyped_storage()])
def test_memory_that_another_holds_is_not_taken_over(
    hold: Callable[[torch.Tensor], object], fake: FakeDriver, module: ModuleType
) -> None:
    add = fake.kernel("add", 3, adder(12))
    made = recipe_of([layout(3, 4)], [0], Launch(add, (1, 1, 1), (Pointer(0), Pointer(0), Pointer(1))))
    step = RECIPE, "made", [], (native_recipe(module, made), [0], [(1, 0)], None)
    given = [torch.arange(12.0)]
    held, address = hold(given[0]), given[0].data_ptr()
    (y,) = module.run(program(module, 2, [(0, None)], [step], [1]), given)
    assert y.data_ptr() != address and held is not None


def test_what_begins_elsewhere_goes_by_python(fake: FakeDriver, module: ModuleType) -> None:
    add = fake.kernel("add", 3, adder(12))
    arguments = Pointer(0), Pointer(0), Pointer(1)
    made = Recipe("made", CPU, (0,), 16, (layout(12),), (0,), [Launch(add, (1, 1, 1), arguments)])
    step = RECIPE, "made", [], (native_recipe(module, made), [0], [(1, -1)], lambda x: [x * 3])
    run = program(module, 2, [(0, None)], [step], [1])
    x = torch.arange(13.0)[1:]
    (y,) = module.run(run, [x])
    assert torch.equal(y, x * 3) and not fake.launches


def test_operators_views_constants_and_python(module: ModuleType) -> None:
    held = torch.full((2, 3), 10.0)
    steps = [
        (VIEW, "t", [], (0, [(1, -1)], executor.native_layout(layout(2, 3, strides=(1, 2))), 0)),
        (CONSTANT, "held", [], (held, [(2, -1)])),
        called("add", [("slot", 1), ("slot", 2), ("constant", 2)], (3, None), frees=[1, 2]),
        (
            CALL,
            "cat",
            [],
            ("aten::cat", "", [("slots", [3, 3]), ("constant", 0)], [(0, 4, executor.native_layout(layout(4, 3)))]),
        ),
        (PYTHON, "double", [], (lambda x, n: [x * n, None], [4, 5], [(6, -1), (7, -1)])),
    ]
    run = module.program(
        (
            CPU,
            None,
            8,
            [(0, executor.native_layout(layout(6))), (5, None)],
            steps,
            [(6, None), (7, None), (-1, "constant"), (5, None)],
        )
    )
    arguments = [torch.arange(6.0), 2]
    y, nothing, constant, number = module.run(run, arguments)
    x = torch.arange(6.0).view(3, 2).T + 20
    assert torch.equal(y, torch.cat([x, x]) * 2)
    assert nothing is None and constant == "constant" and number == 2 and arguments == []


def test_a_number_in_place_of_a_tensor(module: ModuleType) -> None:
    add = called("add", [("slot", 0), ("constant", 2), ("constant", 1)], (1, None))
    (y,) = module.run(program(module, 2, [(0, None)], [add], [1]), [torch.ones(3)])
    assert y.dtype == torch.float32 and y.tolist() == [3.0] * 3


def test_an_absent_tensor_in_a_list(module: ModuleType) -> None:
    index = CALL, "index", [], ("aten::index", "Tensor", [("slot", 0), ("slots", [-1, 1])], [(0, 2, None)])
    x, places = torch.arange(12.0).view(3, 4), torch.tensor([1, 3])
    (y,) = module.run(program(module, 3, [(0, None), (1, None)], [index], [2]), [x, places])
    assert torch.equal(y, x[:, [1, 3]])


def test_other_strides_are_copied_and_other_tensors_refused(module: ModuleType) -> None:
    planned = executor.native_layout(layout(3, 4))
    step = called("clone", [("slot", 0), ("constant", None)], (1, planned), overload="")
    run = program(module, 2, [(0, planned)], [step], [1])
    x = torch.arange(12.0).view(4, 3).T
    (y,) = module.run(run, [x])
    assert y.stride() == (4, 1) and torch.equal(y, x)
    for other in (x.double(), x.reshape(2, 6), 3):
        with pytest.raises(module.PlanMismatch, match="input 0"):
            module.run(run, [other])
    to_half = called("clone", [("slot", 0), ("constant", None)], (1, planned), overload="")
    wrong = program(module, 2, [(0, None)], [to_half], [1])
    with pytest.raises(module.PlanMismatch, match=r"clone is BFloat16\[3, 4\] on cpu, planned as Float\[3, 4\] on cpu"):
        module.run(wrong, [x.bfloat16()])


def test_modes_and_tensors_without_memory_are_left_to_pytorch(module: ModuleType) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    run = program(module, 2, [(0, None)], [called("relu", [("slot", 0)], (1, None), overload="")], [1])
    x = torch.ones(3)
    mode = FakeTensorMode()
    arguments = [mode.from_tensor(x)]
    assert module.run(run, arguments) is None and len(arguments) == 1
    with mode:
        assert module.run(run, [x]) is None
    assert module.run(run, [torch.empty(3, device="meta")]) is None
    assert module.run(run, [x])[0].equal(x)


def test_writes_count_a_tensors_versions(module: ModuleType) -> None:
    add = called("add_", [("slot", 0), ("constant", 1.0), ("constant", 1)], (1, None), overload="Scalar")
    x = torch.zeros(3)
    before = x._version
    module.run(program(module, 2, [(0, None)], [add], [1]), [x])
    assert x._version == before + 1 and x.tolist() == [1.0] * 3


def test_memory_is_free_after_its_last_use(module: ModuleType) -> None:
    import weakref

    alive: list[bool] = []
    x = torch.ones(4)
    watched = weakref.ref(x.untyped_storage())
    made = torch.ones(4)
    first = called("relu", [("slot", 0)], (1, None), overload="", frees=[0])
    look = PYTHON, "look", [], (lambda y: [alive.append(watched() is not None)], [1], [(2, -1)])
    arguments = [x]
    del x
    module.run(program(module, 3, [(0, None)], [first, look], [1]), arguments)
    assert alive == [False] and made is not None


def test_errors_of_operators_and_of_python_pass_through(module: ModuleType) -> None:
    mm = called("mm", [("slot", 0), ("slot", 0)], (1, None), overload="")
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        module.run(program(module, 2, [(0, None)], [mm], [1]), [torch.ones(2, 3)])

    def fail(x: torch.Tensor) -> list[torch.Tensor]:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        module.run(
            program(module, 2, [(0, None)], [(PYTHON, "fail", [], (fail, [0], [(1, -1)]))], [1]), [torch.ones(2)]
        )


def test_word_is_what_the_driver_reads() -> None:
    x = ctypes.c_uint64(executor.word("f", 1.5))
    assert ctypes.c_float.from_address(ctypes.addressof(x)).value == 1.5
    assert word_at(ctypes.addressof(ctypes.c_uint64(5))) == 5
    held = torch.arange(3.0)
    assert floats_at(ctypes.addressof(ctypes.c_uint64(held.data_ptr())), 3).equal(held)
