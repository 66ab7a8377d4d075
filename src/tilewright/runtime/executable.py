"""A compiled graph: kernels, library calls and views over a list of slots, run in order.

Kernels write to pooled storage. A slot is cleared after its last use, which returns the storage. A kernel may overwrite
an operand that it reads last. The executor in C++ runs a graph as one program (`native.py`); this is its Python twin.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch._ops import OpOverload

from tilewright.capture.aot import Boxed
from tilewright.loops.sizes import in_64_bits
from tilewright.pytorch.state import carries_tangents, computes_nothing, shown_as, without_subclass
from tilewright.records.errors import warn_once
from tilewright.records.recipe import Layout, is_expanded
from tilewright.runtime.pool import pool

if TYPE_CHECKING:
    from tilewright.runtime.native import Native

CPU = torch.device("cpu")
_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True


# libgomp's threads do not survive a fork: a child runs kernels on the calling thread alone.
os.register_at_fork(after_in_child=_note_fork)


def threads() -> int:
    return 1 if _forked else torch.get_num_threads()


class PlanMismatch(RuntimeError):
    """An argument of a call or a result of an operator, `result`, differs from its metadata in the graph."""

    def __init__(self, message: str, result: torch.Tensor | None = None) -> None:
        super().__init__(message)
        self.result = result


class IndexOutOfBounds(IndexError, RuntimeError):
    """An index is out of bounds. PyTorch's `gather` raises a RuntimeError then, its other lookups an IndexError."""


def layout_of(meta: torch.Tensor) -> Layout:
    sizes, strides = tuple(map(int, meta.shape)), tuple(map(int, meta.stride()))
    return Layout(sizes, strides, meta.dtype, meta.device, is_unresolved(meta))


def is_unresolved(tensor: torch.Tensor) -> bool:
    """Whether a tensor is shown conjugated or negated: its elements are not those in its memory."""
    return tensor.is_conj() or tensor.is_neg()


def empty(layout: Layout) -> torch.Tensor:
    """An uninitialised tensor of this layout, on a CPU in pooled storage."""
    if layout.device.type == "cpu":
        return pool.empty(layout.shape, layout.strides, layout.dtype, layout.extent)
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=layout.device)


def over(layout: Layout, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of this layout in the storage of `tensor`, which has no reader left; `tensor` itself if its layout fits.

    It is not a view of `tensor`: autograd would forbid a caller to write to it.
    """
    if tensor.dtype == layout.dtype and tensor.shape == layout.shape and tensor.stride() == layout.strides:
        return tensor
    fresh = torch.empty(0, dtype=layout.dtype, device=tensor.device)
    return fresh.set_(tensor.untyped_storage(), tensor.storage_offset(), layout.shape, layout.strides)


def conform(layout: Layout, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy with the planned strides. Raises PlanMismatch for another dtype, shape or device.

    Kernels read memory, so a tensor that is shown conjugated or negated is copied too, unless it is planned as one.
    """
    # A 0-d result planned on the GPU may be on the CPU, like the seeds of PyTorch's attention.
    elsewhere = tensor.dim() > 0 and tensor.device.type != layout.device.type
    if tensor.dtype != layout.dtype or tensor.shape != layout.shape or elsewhere:
        raise PlanMismatch(
            f"a result is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, "
            f"planned as {layout.dtype} {list(layout.shape)} on {layout.device}",
            tensor,
        )
    is_shown = layout.is_unresolved or not is_unresolved(tensor)
    # Strides may differ along axes of one element.
    has_strides = tensor.stride() == layout.strides or all(
        mine == theirs or size == 1
        for size, mine, theirs in zip(layout.shape, layout.strides, tensor.stride(), strict=True)
    )
    if tensor.numel() == 0 or (is_shown and has_strides):
        return tensor
    if is_expanded(layout.shape, layout.strides):
        text = f"a result has strides {tensor.stride()}, planned as {layout.strides}, which share elements"
        raise PlanMismatch(text, tensor)
    fresh = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=tensor.device)
    return fresh.copy_(tensor)


Slots = list[Any]


@dataclass
class Step:
    """One step of an executable."""

    generated: ClassVar[bool] = False
    """Whether it launches a generated kernel."""
    name: str
    frees: tuple[int, ...] = field(default=(), kw_only=True)
    """Slots whose last use is this step."""

    @property
    def reads(self) -> tuple[int, ...]:
        """Slots that it reads."""
        return ()

    @property
    def writes(self) -> tuple[int, ...]:
        """Slots that it fills."""
        raise NotImplementedError

    def run(self, slots: Slots) -> None:
        raise NotImplementedError


@dataclass
class GeneratedStep(Step):
    """One generated kernel."""

    generated: ClassVar[bool] = True
    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, Layout, int | None], ...]
    """Slot, layout, and the slot whose storage it overwrites (or None)."""
    given: frozenset[int] = field(default=frozenset(), kw_only=True)
    """Slots of the call's arguments. Only the executor in C++ overwrites these: it can see whether the caller still
    holds their storage."""

    @property
    def reads(self) -> tuple[int, ...]:
        return self.inputs

    @property
    def writes(self) -> tuple[int, ...]:
        return tuple(slot for slot, *_ in self.outputs)

    def results(self, slots: Slots) -> list[torch.Tensor]:
        """Fill the output slots with tensors to write to, and return these."""
        for slot, layout, taken in self.outputs:
            is_fresh = taken is None or taken in self.given
            slots[slot] = empty(layout) if is_fresh else over(layout, slots[taken])  # type: ignore[index]
        return [slots[slot] for slot in self.writes]


@dataclass
class KernelStep(GeneratedStep):
    """One compiled C++ kernel."""

    function: Callable[..., int]
    """Returns 0, or 1 if an index was out of bounds."""
    checks: tuple[int, ...] = ()
    """The extents that bound its indices."""
    sizes: tuple[int | float, ...] = ()
    """Its arguments, if it serves several sizes."""

    def run(self, slots: Slots) -> None:
        tensors = [slots[i] for i in self.inputs] + self.results(slots)
        sizes = (ctypes.c_int64 * len(self.sizes))(*in_64_bits(self.sizes))
        pointers = (ctypes.c_void_p * (len(tensors) + 1))(*(t.data_ptr() for t in tensors), ctypes.addressof(sizes))
        if self.function(pointers, threads()):
            raise IndexOutOfBounds(self.outside)

    @property
    def outside(self) -> str:
        """The error message for an index out of bounds."""
        sizes = " or ".join(map(str, self.checks))
        return f"index out of bounds for a dimension of size {sizes} (kernel {self.name})"


@dataclass
class OneResult(Step):
    """A step that fills one slot."""

    output: int

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.output,)


@dataclass
class CallStep(OneResult):
    """A call of an operator or another function; a `Slot` among the arguments stands for the slot's value."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spec: Layout | None = None
    out: Layout | None = None
    """The layout of the pooled tensor that `target`, an `out=` overload, writes to."""
    recipe: Any = None
    """The steps that the executor performs for one of tilewright's operators on a GPU; their inputs are `reads`."""
    operator: OpOverload | None = None
    """The operator that the recipe stands for."""

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(slots_in((self.args, self.kwargs))))

    def run(self, slots: Slots) -> None:
        args = [fill(a, slots) for a in self.args]
        if self.out is not None:
            slots[self.output] = self.target(*args, out=empty(self.out))
            return
        kwargs = {k: fill(v, slots) for k, v in self.kwargs.items()} if self.kwargs else {}
        result = self.target(*args, **kwargs)
        slots[self.output] = conform(self.spec, result) if self.spec is not None else result


@dataclass
class ViewStep(OneResult):
    """A chain of views as one tensor over the memory of its base, which is no view of it for autograd."""

    base: int
    spec: Layout
    offset: int = 0
    """Elements from the base's first element to the view's."""

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.base,)

    def run(self, slots: Slots) -> None:
        base = slots[self.base]
        fresh = torch.empty(0, dtype=base.dtype, device=base.device)
        start = base.storage_offset() + self.offset
        made = fresh.set_(base.untyped_storage(), start, self.spec.shape, self.spec.strides)
        slots[self.output] = shown_as(made, base) if is_unresolved(base) else made


@dataclass
class ConstantStep(OneResult):
    """A tensor that is a constant of the program."""

    value: Any

    def run(self, slots: Slots) -> None:
        slots[self.output] = self.value


@dataclass(frozen=True)
class Slot:
    """An argument that is the value of a slot."""

    index: int
    is_number: bool = False
    """Whether it holds a number: PyTorch's Python functions accept one where its operators require a tensor."""


def fill(argument: Any, slots: Slots) -> Any:
    """The argument with the value of each `Slot` in its place."""
    kind = type(argument)
    if kind is Slot:
        return slots[argument.index]
    if kind is tuple:
        return tuple([fill(a, slots) for a in argument])
    if kind is list:
        return [fill(a, slots) for a in argument]
    if kind is dict:
        return {k: fill(a, slots) for k, a in argument.items()}
    return argument


def slots_in(argument: Any) -> Iterator[int]:
    """The slots that an argument names, in order."""
    if isinstance(argument, Slot):
        yield argument.index
    elif isinstance(argument, (tuple, list)):
        for value in argument:
            yield from slots_in(value)
    elif isinstance(argument, dict):
        yield from slots_in(tuple(argument.values()))


Resume = Callable[[int, Slots], Sequence[Any]]
"""Gives the results of a call whose steps before this one have run and filled these slots."""
GiveUp = Callable[[PlanMismatch], None]


def warn_of(error: PlanMismatch) -> None:
    warn_once(f"a compiled graph runs as PyTorch runs it: {error}")


class Executable:
    """Call with the list of inputs, which is emptied; returns the list of results, as AOTAutograd expects.

    `otherwise` runs the graph as PyTorch does: for tensors without their own memory (fake tensors, subclasses), under a
    mode that computes nothing, for forward-mode differentiation, and for all later calls once an operator has returned
    something else than its metadata say. `resume` ends the call in which it did, which shows in the first one, as
    PyTorch does: nothing runs twice. `give_up` says so, or raises.
    """

    _boxed_call = True

    def __init__(
        self, steps: Sequence[Step], slots: int, inputs: Sequence[tuple[int, Layout | None]], outputs: Sequence[Any],
        otherwise: Boxed, resume: Resume, native: Native | None = None, give_up: GiveUp = warn_of,
    ) -> None:  # fmt: skip
        self.steps = steps
        self.slots = slots
        self.inputs = inputs
        self.outputs = outputs
        self.otherwise = otherwise
        self.resume = resume
        self.native = native
        self.give_up = give_up
        self._is_given_up = False
        self._was_right = False
        """Whether a call has returned results as planned; a result that is not as planned shows in the first call."""

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if carries_tangents(args):
            return self.otherwise(args)
        kept = None
        if not self._was_right:
            # AOTAutograd runs the first call under a mode that rejects subclasses.
            args[:] = map(as_plain, args)
            kept = list(args)
        try:
            results = self._run(args)
        except PlanMismatch as error:
            if kept is None:
                raise
            self._give_up(error)
            return self.otherwise(kept)
        self._was_right = True
        return results

    def _run(self, args: list[Any]) -> Sequence[Any]:
        if self._is_given_up:
            return self.otherwise(args)
        run = self.native.program(self) if self.native and self._was_right else None
        if run is None:
            args[:] = map(as_plain, args)
            has_memory = all(map(is_plain, args)) and not computes_nothing()
            return self._run_in_python(args) if has_memory else self.otherwise(args)
        results = run(args)
        return self.otherwise(args) if results is None else results

    def _run_in_python(self, args: list[Any]) -> Sequence[Any]:
        slots: Slots = [None] * self.slots
        for (slot, spec), value in zip(self.inputs, args, strict=True):
            slots[slot] = value if spec is None else conform(spec, value)
        args.clear()
        for position, step in enumerate(self.steps):
            try:
                step.run(slots)
            except PlanMismatch as error:
                if self._was_right:
                    raise
                self._give_up(error)
                slots[step.writes[0]] = error.result
                return self.resume(position + 1, slots)
            for index in step.frees:
                slots[index] = None
        return [fill(o, slots) for o in self.outputs]

    def _give_up(self, error: PlanMismatch) -> None:
        self.give_up(error)
        self._is_given_up = True

    @property
    def kernels(self) -> list[Step]:
        return [step for step in self.steps if step.generated]


def as_plain(value: Any) -> Any:
    """`value`; for a tensor of a subclass that does not intercept operators, the same as a `torch.Tensor`."""
    return value if is_plain(value) else without_subclass(value)


def is_plain(value: Any) -> bool:
    """Whether this is no tensor, or a `torch.Tensor` or `Parameter` (no subclass)."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) or not isinstance(value, torch.Tensor)
