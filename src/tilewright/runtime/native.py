"""A compiled graph as one program of the executor in C++: its steps as plain data, and when it is used."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from tilewright.launch import driver
from tilewright.launch.executor import EXTENSION, native_layout, native_recipe
from tilewright.launch.triton import launches_are_watched
from tilewright.records.errors import CompilerError, warn_once
from tilewright.records.recipe import Layout, Recipe
from tilewright.runtime.executable import (
    CallStep,
    ConstantStep,
    Executable,
    IndexOutOfBounds,
    KernelStep,
    PlanMismatch,
    Slot,
    Step,
    ViewStep,
    empty,
)
from tilewright.runtime.gpu import TritonStep
from tilewright.runtime.pool import SMALL

NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Classes of a number of a graph; symbols are those that depend on data."""
Run = Callable[[list[Any]], Any]
"""Runs a program on a list of arguments, which is emptied; None, and nothing done, where they are not plain tensors."""
RECIPE, CALL, VIEW, CONSTANT, PYTHON, KERNEL = range(6)
"""Kinds of steps, as in launch/native/program.h."""
CALLS_IN_PYTHON = 2
"""Calls of a graph on a CPU before the executor is built: a program that calls it once or twice needs none."""


class Native:
    """The program of one executable on `device`, made when the executor has been built."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._run: Run | None = None
        self._failed = False
        self._calls_in_python = CALLS_IN_PYTHON if device.type == "cpu" else 0
        if not self._calls_in_python:
            EXTENSION.module()

    def program(self, executable: Executable) -> Run | None:
        """What runs `executable`; None while its steps must run in Python."""
        if self._run is None and self._calls_in_python and EXTENSION.found is None:
            self._calls_in_python -= 1
            return None
        if self._run is None and not self._failed and (module := EXTENSION.module()) is not None:
            try:
                self._run = _program(module, executable, self.device)
            # Programs that the executor does not support run in Python.
            except (CompilerError, RuntimeError, TypeError) as error:
                self._failed = True
                warn_once(f"compiled models cost the host more in Python: {error}")
        is_watched = self.device.type == "cuda" and launches_are_watched()
        return None if is_watched else self._run


def _program(module: ModuleType, executable: Executable, device: torch.device) -> Run:
    inputs = [(slot, None if spec is None else native_layout(spec)) for slot, spec in executable.inputs]
    parts = _parts(executable)
    taken = {id(part) for found in parts.values() for part in found}
    steps = []
    for step in executable.steps:
        if id(step) not in taken:
            kind, detail = _step(module, step, parts)
            steps.append((kind, step.name, step.frees, detail))
    outputs = [(o.index, None) if isinstance(o, Slot) else (-1, o) for o in executable.outputs]
    table = driver.table(device.index or 0) if device.type == "cuda" else None
    program = module.program((device, table, executable.slots, inputs, steps, outputs))

    def run(args: list[Any]) -> Any:
        try:
            return module.run(program, args)
        except module.PlanMismatch as error:
            raise PlanMismatch(str(error)) from None
        except module.IndexOutOfBounds as error:
            raise IndexOutOfBounds(str(error)) from None

    return run


def _parts(executable: Executable) -> dict[int, list[CallStep]]:
    """For each slot of several results, the steps that take one: the executor fills their slots at once."""
    found: dict[int, list[CallStep]] = {}
    for step in executable.steps:
        if isinstance(step, CallStep) and step.target is operator.getitem:
            found.setdefault(step.args[0].index, []).append(step)
    return found


def holds_values(graph: fx.Graph) -> bool:
    """Whether the graph computes with tensors and numbers alone; several results of a call are taken one by one."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and not _is_value(value):
            return False
        # A branch of a higher-order operator is a module.
        if node.op == "get_attr" and not isinstance(attrgetter(str(node.target))(graph.owning_module), torch.Tensor):
            return False
        if node.op == "call_function" and not _is_value(value):
            if not isinstance(value, (tuple, list)) or not all(map(_is_value, value)):
                return False
            if any(user.target is not operator.getitem for user in node.users):
                return False
    return True


def _is_value(value: object) -> bool:
    # The ragged size of a nested tensor stays a symbol when the program runs.
    if isinstance(value, torch.SymInt) and value.node.is_nested_int():
        return False
    return value is None or isinstance(value, (torch.Tensor, *NUMBERS))


def _step(module: ModuleType, step: Step, parts: Mapping[int, Sequence[CallStep]]) -> tuple[int, tuple[Any, ...]]:
    """The kind of a step, and its description for the executor, as `program.h` reads it."""
    if isinstance(step, TritonStep) and (recipe := step.recipe()) is not None:
        outputs = [(slot, -1 if over is None else over) for slot, _, over in step.outputs]
        return RECIPE, (native_recipe(module, recipe), step.inputs, outputs, _in_python(step))
    if isinstance(step, KernelStep):
        outputs = [(slot, -1 if over is None else over) for slot, _, over in step.outputs]
        results = [_fresh(spec) for _, spec, _ in step.outputs]
        address = ctypes.cast(step.function, ctypes.c_void_p).value  # type: ignore[arg-type]
        return KERNEL, (address, step.inputs, outputs, results, step.outside)
    outputs = [(slot, -1) for slot in step.writes]
    if isinstance(step, ViewStep):
        return VIEW, (step.base, outputs, native_layout(step.spec), step.offset)
    if isinstance(step, ConstantStep) and isinstance(step.value, torch.Tensor):
        return CONSTANT, (step.value, outputs)
    if isinstance(step, CallStep):
        taken = parts.get(step.output)
        if (recipe := _recipe(step, taken)) is not None:
            slots = [part.output for part in taken] if taken is not None else [step.output]
            made, outputs = native_recipe(module, recipe), [(slot, -1) for slot in slots]
            return RECIPE, (made, step.reads, outputs, _in_python(step, taken), _recorded(step))
        if (call := _call(step, taken)) is not None:
            return CALL, call
        if taken is not None:
            return PYTHON, (_in_python(step, taken), step.reads, [(part.output, -1) for part in taken])
    return PYTHON, (_in_python(step), step.reads, outputs)


def _recipe(step: CallStep, parts: Sequence[CallStep] | None) -> Recipe | None:
    """The step's recipe, whose results are those that `parts` take; None where it has none, or two take one result."""
    if step.recipe is None:
        return None
    if parts is None:
        return step.recipe if len(step.recipe.results) == 1 else None
    places = [int(part.args[1]) for part in parts]
    if len(set(places)) < len(places):
        return None
    # A result that no step reads is scratch.
    return replace(step.recipe, results=tuple(step.recipe.results[place] for place in places))


def _recorded(step: CallStep) -> tuple[Any, ...] | None:
    """The operator that a recipe stands for, and its arguments, for a profiler; None where they have no form."""
    target = step.operator
    if target is None or (operands := _operands(target, step)) is None:
        return None
    return target._schema.name, target._schema.overload_name, operands


def _call(step: CallStep, parts: Sequence[CallStep] | None) -> tuple[Any, ...] | None:
    """A call through the dispatcher; None where it is no operator of PyTorch's, or one that gives a list."""
    target = step.target
    if not isinstance(target, OpOverload) or (operands := _operands(target, step)) is None:
        return None
    results = [(0, step.output, _checked(step))] if target._schema.returns else []
    if parts is not None:
        if len(target._schema.returns) == 1:
            return None
        results = [(int(part.args[1]), part.output, _checked(part)) for part in parts]
    return target._schema.name, target._schema.overload_name, operands, results


def _checked(step: CallStep) -> tuple[Any, ...] | None:
    return None if step.spec is None else native_layout(step.spec)


def _operands(target: OpOverload, step: CallStep) -> list[tuple[str, Any]] | None:
    """One for each argument of the operator's schema; None where the executor has no form for one."""
    values = []
    for place, argument in enumerate(target._schema.arguments):
        if argument.is_out and step.out is not None:
            values.append(("fresh", _fresh(step.out)))
            continue
        given = step.args[place] if place < len(step.args) else step.kwargs.get(argument.name, argument.default_value)
        operand = _operand(given)
        # The executor makes lists of tensors; those of sizes that depend on data are Python's.
        is_tensor = "Tensor" in str(argument.type)
        is_number = isinstance(given, Slot) and given.is_number
        if operand is None or (is_tensor and is_number) or (operand[0] == "slots" and not is_tensor):
            return None
        values.append(operand)
    return values


def _fresh(layout: Layout) -> tuple[Any, ...]:
    """A tensor's layout, and what allocates it where that is not PyTorch."""
    is_pooled = layout.extent * layout.dtype.itemsize >= SMALL
    return native_layout(layout), partial(empty, layout) if is_pooled else None


def _operand(value: Any) -> tuple[str, Any] | None:
    if isinstance(value, Slot):
        return "slot", value.index
    if isinstance(value, (list, tuple)) and any(isinstance(v, Slot) for v in value):
        if any(not isinstance(v, Slot) and v is not None for v in value):
            return None
        return "slots", [-1 if v is None else v.index for v in value]
    return "constant", value


def _in_python(step: Step, parts: Sequence[CallStep] | None = None) -> Callable[..., list[Any]]:
    """The step as a function of the values it reads; it gives those it writes, or those that `parts` take of it."""
    inputs, outputs = step.reads, [part.output for part in parts or ()] or step.writes

    def run(*values: Any) -> list[Any]:
        slots: Any = dict(zip(inputs, values, strict=True))
        step.run(slots)
        for part in parts or ():
            part.run(slots)
        return [slots[slot] for slot in outputs]

    return run
