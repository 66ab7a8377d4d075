"""Triton kernels among the steps of an executable, in C++, on a driver that launches nothing."""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.kernels.attention.driver import Asked, Launched, Switched
from tilewright.runtime import launch
from tilewright.runtime.executable import TensorSpec
from tilewright.runtime.launch import EXTENSION, Driver, Kernel, bound

CPU = torch.device("cpu")
STREAM, CONTEXT, INVALID_CONTEXT = 99, 77, 201


class Adder:
    """Kernels that write into every result the sum of the inputs, in fp32."""

    def __init__(self, inputs: int, results: int, numbers: int) -> None:
        self.launched: list[tuple[int, ...]] = []
        self.refusals: list[int] = []
        self.contexts: list[int] = []
        self.trailing: list[int] = []
        self.counts = inputs, results, numbers
        self.entries = Launched(self.launch), Switched(self.switch), Asked(self.stream)

    def launch(self, function: int, *rest: Any) -> int:
        *shape, stream, parameters, _ = rest
        if self.refusals:
            return self.refusals.pop(0)
        inputs, results, numbers = self.counts
        self.launched.append((function, *shape, stream))
        places = (ctypes.c_uint64 * (inputs + results + 2)).from_address(parameters)
        pointers = [ctypes.c_uint64.from_address(place).value for place in places]
        tensors = [
            torch.frombuffer((ctypes.c_float * numbers).from_address(p), dtype=torch.float32) for p in pointers[:-2]
        ]
        for result in tensors[inputs:]:
            result.copy_(sum(tensors[:inputs]))  # type: ignore[arg-type]
        self.trailing = pointers[-2:]
        return 0

    def switch(self, context: int) -> int:
        self.contexts.append(context)
        return 0

    def stream(self, device: int, to: Any) -> int:
        to[0] = STREAM
        return 0


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return EXTENSION.load(EXTENSION.built())


@pytest.fixture
def adder(monkeypatch: pytest.MonkeyPatch) -> Adder:
    made = Adder(2, 2, 12)
    addresses = [ctypes.cast(entry, ctypes.c_void_p).value for entry in made.entries]
    monkeypatch.setattr(launch, "driver_of", lambda device: Driver(*addresses, CONTEXT))
    return made


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec.of(torch.empty(shape, dtype=dtype, device="meta"))


def test_results_take_their_slots(module: ModuleType, adder: Adder) -> None:
    transposed = TensorSpec((3, 4), (1, 3), torch.float32, 12)
    run = bound(
        module,
        CPU,
        [Kernel(5, 7, 128, 64), Kernel(6, 8, 256, 0)],
        (3, 0),
        [(1, transposed, None), (4, spec(12), None)],
        [],
    )
    assert run
    slots: list[Any] = [torch.arange(12.0), None, None, torch.ones(12), "old"]
    assert run(slots)
    assert adder.launched == [(5, 7, 1, 1, 128, 1, 1, 64, STREAM), (6, 8, 1, 1, 256, 1, 1, 0, STREAM)]
    assert adder.trailing == [0, 0]
    assert torch.equal(slots[4], torch.arange(12.0) + 1)
    assert slots[1].shape == (3, 4) and slots[1].stride() == (1, 3)
    assert torch.equal(slots[1].as_strided((12,), (1,)), slots[4])
    assert slots[2] is None and torch.equal(slots[0], torch.arange(12.0))


def test_storage_is_taken_over(module: ModuleType, adder: Adder) -> None:
    run = bound(module, CPU, [Kernel(5, 1, 32, 0)], (0, 1), [(2, spec(12), 0), (3, spec(3, 4), 1)], [])
    assert run
    alike, other = torch.arange(12.0), torch.ones(12)
    slots: list[Any] = [alike, other, None, None]
    assert run(slots)
    assert slots[2] is alike
    assert slots[3].data_ptr() == other.data_ptr() and slots[3].shape == (3, 4) and not slots[3]._is_view()


def test_what_begins_elsewhere_is_left_to_python(module: ModuleType, adder: Adder) -> None:
    run = bound(module, CPU, [Kernel(5, 1, 32, 0)], (0, 1), [(2, spec(12), None), (3, spec(12), None)], [])
    assert run
    slots: list[Any] = [torch.arange(13.0)[1:], torch.ones(12), None, None]
    assert not run(slots)
    assert slots[2:] == [None, None] and not adder.launched


def test_refusals_and_contexts(module: ModuleType, adder: Adder) -> None:
    run = bound(module, CPU, [Kernel(5, 1, 32, 0)], (0, 1), [(2, spec(12), None), (3, spec(12), None)], [])
    assert run
    slots: list[Any] = [torch.arange(12.0), torch.ones(12), None, None]
    adder.refusals = [INVALID_CONTEXT]
    assert run(slots) and adder.contexts == [CONTEXT]
    adder.refusals = [700]
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        run(slots)
    with pytest.raises(RuntimeError, match="slot 0 holds no tensor"):
        run([None, *slots[1:]])


def test_scratch_follows_the_results(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Adder(1, 3, 8)
    addresses = [ctypes.cast(entry, ctypes.c_void_p).value for entry in made.entries]
    monkeypatch.setattr(launch, "driver_of", lambda device: Driver(*addresses, CONTEXT))
    run = bound(
        module, CPU, [Kernel(5, 1, 32, 0)], (0,), [(1, spec(16, dtype=torch.bfloat16), None)],
        [(8, torch.float32), (4, torch.float64)],
    )  # fmt: skip
    assert run
    slots: list[Any] = [torch.arange(8.0), None]
    assert run(slots)
    assert slots[1].dtype == torch.bfloat16
    assert torch.equal(slots[1].view(torch.float32), torch.arange(8.0))


def test_too_many_are_left_to_python(module: ModuleType, adder: Adder) -> None:
    assert bound(module, CPU, [], range(launch.MOST_INPUTS + 1), [], []) is None
    assert bound(module, CPU, [], (0,), [(1, spec(*[1] * (launch.MOST_AXES + 1)), None)], []) is None
