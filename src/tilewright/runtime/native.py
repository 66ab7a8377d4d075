"""Describes a compiled graph to the C++ executor as one program, and decides when the executor runs it."""

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
from tilewright.loops.sizes import in_64_bits
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
"""Classes of a graph's numbers; symbolic ones depend on data."""
Run = Callable[[list[Any]], Any]
"""Runs a program on a list of arguments, which it empties. If these are not plain tensors it does nothing and returns
None."""
RECIPE, CALL, VIEW, CONSTANT, PYTHON, KERNEL = range(6)
"""Kinds of steps, as in launch/native/program.h."""
CALLS_IN_PYTHON = 2
"""Calls of a graph on a CPU that run in Python before the executor's build starts: few calls do not need it."""


class Native:
    """The program of one executable on `device`, made once the executor is built."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._run: Run | None = None
        self._failed = False
        self._calls_in_python = CALLS_IN_PYTHON if device.type == "cpu" else 0
        if not self._calls_in_python:
            EXTENSION.module()

    def program(self, executable: Executable) -> Run | None:
        """The function that runs `executable`; None while its steps must run in Python."""
        if self._run is None and self._calls_in_python and EXTENSION.found is None:
            self._calls_in_python -= 1
            return None
        if self._run is None and not self._failed and (module := EXTENSION.module()) is not None:
            try:
                self._run = _program(module, executable, self.device)
            # A program that the executor does not support runs in Python.
            except (CompilerError, RuntimeError, TypeError) as error:
                self._failed = True
                warn_once(f"compiled models cost the host more in Python: {error}")
        is_watched = self.device.type == "cuda" and launches_are_watched()
        return None if is_watched else self._run


def _program(module: ModuleType, executable: Executable, device: torch.device) -> Run:
    inputs = [(slot, None if spec is None else native_layout(spec)) for slot, spec in executable.inputs]
    parts = _getitems(executable)
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


def _getitems(executable: Executable) -> dict[int, list[CallStep]]:
    """For each slot that holds several results, the `getitem` steps: the executor fills their slots with the call."""
    found: dict[int, list[CallStep]] = {}
    for step in executable.steps:
        if isinstance(step, CallStep) and step.target is operator.getitem:
            found.setdefault(step.args[0].index, []).append(step)
    return found


def holds_values(graph: fx.Graph) -> bool:
    """Whether all values are tensors and numbers, and each call with several results is read by `getitem` alone."""
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
    # The ragged size of a nested tensor is symbolic even when the program runs.
    if isinstance(value, torch.SymInt) and value.node.is_nested_int():
        return False
    return value is None or isinstance(value, (torch.Tensor, *NUMBERS))


def _step(module: ModuleType, step: Step, parts: Mapping[int, Sequence[CallStep]]) -> tuple[int, tuple[Any, ...]]:
    """The kind of a step and its description, as native/program.h reads them."""
    if isinstance(step, TritonStep) and (recipe := step.recipe()) is not None:
        outputs = [(slot, -1 if over is None else over) for slot, _, over in step.outputs]
        return RECIPE, (native_recipe(module, recipe), step.inputs, outputs, _in_python(step))
    if isinstance(step, KernelStep):
        outputs = [(slot, -1 if over is None else over) for slot, _, over in step.outputs]
        results = [_fresh(spec) for _, spec, _ in step.outputs]
        address = ctypes.cast(step.function, ctypes.c_void_p).value  # type: ignore[arg-type]
        return KERNEL, (address, step.inputs, outputs, results, step.outside, in_64_bits(step.sizes))
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
    """The step's recipe with the results that `parts` take; None without a recipe, or if two parts take one result."""
    recipe: Recipe | None = step.recipe
    if recipe is None:
        return None
    if parts is None:
        return recipe if len(recipe.results) == 1 else None
    places = [int(part.args[1]) for part in parts]
    if len(set(places)) < len(places):
        return None
    # A result that no step reads is scratch.
    return replace(recipe, results=tuple(recipe.results[place] for place in places))


def _recorded(step: CallStep) -> tuple[Any, ...] | None:
    """A recipe's operator and arguments for a profiler; None if the executor cannot represent an argument."""
    target = step.operator
    if target is None or (operands := _operands(target, step)) is None:
        return None
    return target._schema.name, target._schema.overload_name, operands


def _call(step: CallStep, parts: Sequence[CallStep] | None) -> tuple[Any, ...] | None:
    """A call through the dispatcher; None if it is no operator, or returns a list."""
    target = step.target
    if not isinstance(target, OpOverload) or (operands := _operands(target, step)) is None:
        return None
    if parts is not None and len(target._schema.returns) == 1:
        return None
    taken = [(0, step)] if parts is None else [(int(part.args[1]), part) for part in parts]
    results = [(i, one.output, None if one.spec is None else native_layout(one.spec)) for i, one in taken]
    results = results if target._schema.returns else []
    return target._schema.name, target._schema.overload_name, operands, results


def _operands(target: OpOverload, step: CallStep) -> list[tuple[str, Any]] | None:
    """A call's operands in the order of the schema; None if the executor cannot represent one."""
    values = []
    for place, argument in enumerate(target._schema.arguments):
        if argument.is_out and step.out is not None:
            values.append(("fresh", _fresh(step.out)))
            continue
        given = step.args[place] if place < len(step.args) else step.kwargs.get(argument.name, argument.default_value)
        operand = _operand(given)
        # The executor makes lists of tensors, but not of sizes that depend on data.
        is_tensor = "Tensor" in str(argument.type)
        is_number = isinstance(given, Slot) and given.is_number
        if operand is None or (is_tensor and is_number) or (operand[0] == "slots" and not is_tensor):
            return None
        values.append(operand)
    return values


def _fresh(layout: Layout) -> tuple[Any, ...]:
    """A result's layout, and the function that allocates it in the pool, or None if PyTorch does."""
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
    """The step as a function of the values that it reads; returns its results, or those that `parts` select."""
    inputs, outputs = step.reads, [part.output for part in parts or ()] or step.writes

    def run(*values: Any) -> list[Any]:
        slots: Any = dict(zip(inputs, values, strict=True))
        step.run(slots)
        for part in parts or ():
            part.run(slots)
        return [slots[slot] for slot in outputs]

    return run
