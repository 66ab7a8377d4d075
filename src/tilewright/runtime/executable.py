"""A compiled graph: kernels, library calls and views over a list of slots, run in order.

Kernels write to pooled storage; a slot is cleared after its last use, so that storage goes back as
early as it can. A kernel may write in place of an operand that dies with it. A graph runs as one program of the
executor in C++ (`native.py`); the steps here are its Python twin.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch._ops import OpOverload

from tilewright.graph.capture import Boxed
from tilewright.graph.pytorch_state import carries_tangents, computes_nothing, without_subclass
from tilewright.records.errors import warn_once
from tilewright.records.recipe import Layout, Recipe, is_expanded
from tilewright.runtime.pool import pool

if TYPE_CHECKING:
    from tilewright.runtime.native import Native

CPU = torch.device("cpu")
_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True


# libgomp's threads do not survive a fork; the child runs on the calling thread alone.
os.register_at_fork(after_in_child=_note_fork)


def threads() -> int:
    return 1 if _forked else torch.get_num_threads()


class PlanMismatch(RuntimeError):
    """A call's argument or an operator's result differs from its metadata in the graph."""


class IndexOutOfBounds(IndexError, RuntimeError):
    """An index names no element; PyTorch's `gather` raises a RuntimeError, its other lookups an IndexError."""


def layout_of(meta: torch.Tensor) -> Layout:
    return Layout(tuple(map(int, meta.shape)), tuple(map(int, meta.stride())), meta.dtype, meta.device)


def empty(layout: Layout) -> torch.Tensor:
    """An uninitialised tensor of this layout; on a CPU in pooled storage."""
    if layout.device.type == "cpu":
        return pool.empty(layout.shape, layout.strides, layout.dtype, layout.extent)
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=layout.device)


def over(layout: Layout, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of this layout in the storage of `tensor`, which has no reader left; `tensor` itself if its layout fits.

    It is not a view of that one: autograd forbids a caller to write to a result that is a view.
    """
    if tensor.dtype == layout.dtype and tensor.shape == layout.shape and tensor.stride() == layout.strides:
        return tensor
    fresh = torch.empty(0, dtype=layout.dtype, device=tensor.device)
    whole = tensor.as_strided((layout.extent,), (1,))
    return fresh.set_(  # type: ignore[call-overload, no-any-return]
        whole, whole.storage_offset(), layout.shape, layout.strides
    )


def conform(layout: Layout, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself, or a copy where its strides are not those planned; PlanMismatch for another tensor."""
    # A 0-d result may be on the CPU although it was planned on the GPU, as the seeds of PyTorch's attention are.
    elsewhere = tensor.dim() > 0 and tensor.device.type != layout.device.type
    if tensor.dtype != layout.dtype or tensor.shape != layout.shape or elsewhere:
        raise PlanMismatch(
            f"a result is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, "
            f"planned as {layout.dtype} {list(layout.shape)} on {layout.device}"
        )
    if tensor.stride() == layout.strides or tensor.numel() == 0 or _has_strides(tensor, layout):
        return tensor
    if is_expanded(layout.shape, layout.strides):
        raise PlanMismatch(f"a result has strides {tensor.stride()}, planned as {layout.strides}, which share elements")
    fresh = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=tensor.device)
    return fresh.copy_(tensor)


def _has_strides(tensor: torch.Tensor, layout: Layout) -> bool:
    """Whether strides differ only where there is one element."""
    triples = zip(layout.shape, layout.strides, tensor.stride(), strict=True)
    return all(mine == theirs or size == 1 for size, mine, theirs in triples)


Slots = list[Any]


@dataclass
class Step:
    """One step of an executable."""

    generated: ClassVar[bool] = False
    """Whether it launches a kernel that tilewright wrote."""
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
    """Slot, layout, and the slot whose storage it takes over (or None)."""
    given: frozenset[int] = field(default=frozenset(), kw_only=True)
    """Slots of the call's arguments: only the executor in C++ sees whether nobody else holds the storage of one."""

    @property
    def reads(self) -> tuple[int, ...]:
        return self.inputs

    @property
    def writes(self) -> tuple[int, ...]:
        return tuple(slot for slot, *_ in self.outputs)

    def results(self, slots: Slots) -> list[torch.Tensor]:
        """Tensors to write to, which fill their slots."""
        found = []
        for slot, layout, taken in self.outputs:
            is_fresh = taken is None or taken in self.given
            slots[slot] = empty(layout) if is_fresh else over(layout, slots[taken])  # type: ignore[index]
            found.append(slots[slot])
        return found


@dataclass
class KernelStep(GeneratedStep):
    """One compiled C++ kernel."""

    function: Callable[..., int]
    """Gives 0, or 1 if an index was outside."""
    checks: tuple[int, ...] = ()
    """The extents that its indices must stay below."""

    def run(self, slots: Slots) -> None:
        tensors = [slots[i] for i in self.inputs] + self.results(slots)
        pointers = (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
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
    """A PyTorch operator (or a view); arguments name slots by `Slot`."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spec: Layout | None = None
    out: Layout | None = None
    """The layout of a pooled tensor that `target`, an overload with `out=`, writes to."""
    recipe: Recipe | None = None
    """Of one of tilewright's operators on a GPU: what the executor does instead; its inputs are `reads`."""
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
    """Elements of another tensor under other strides: a chain of views in one."""

    base: int
    spec: Layout
    offset: int = 0
    """Elements from the other tensor's first one to its own."""

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.base,)

    def run(self, slots: Slots) -> None:
        base = slots[self.base]
        slots[self.output] = base.as_strided(self.spec.shape, self.spec.strides, base.storage_offset() + self.offset)


@dataclass
class ConstantStep(OneResult):
    """A tensor that the program itself holds."""

    value: Any

    def run(self, slots: Slots) -> None:
        slots[self.output] = self.value


@dataclass(frozen=True)
class Slot:
    """A place in the list of values, as an argument."""

    index: int
    is_number: bool = False
    """Whether it holds a number, which PyTorch's functions in Python take for a tensor, and its operators do not."""


def fill(argument: Any, slots: Slots) -> Any:
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


class Executable:
    """Call with the list of inputs (which is emptied); gives the list of results, as AOTAutograd expects.

    `otherwise` runs the graph as PyTorch does: for tensors without memory of their own (fake ones, subclasses), under
    a mode that computes nothing, for forward-mode differentiation, and from the moment on when an operator does not
    return what the graph says.
    """

    _boxed_call = True

    def __init__(
        self, steps: Sequence[Step], slots: int, inputs: Sequence[tuple[int, Layout | None]], outputs: Sequence[Any],
        otherwise: Boxed, native: Native | None = None,
    ) -> None:  # fmt: skip
        self.steps = steps
        self.slots = slots
        self.inputs = inputs
        self.outputs = outputs
        self.otherwise = otherwise
        self.native = native
        self._is_given_up = False
        self._was_right = False
        """Whether every result was once as planned: only the first call can show that one is not."""

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if carries_tangents(args):
            return self.otherwise(args)
        kept = None
        if not self._was_right:
            # AOTAutograd watches this call with a mode that takes tensors of no other class.
            args[:] = map(as_plain, args)
            kept = list(args)
        try:
            results = self._run(args)
        except PlanMismatch as error:
            if kept is None:
                raise
            warn_once(f"a compiled graph runs as PyTorch runs it: {error}")
            self._is_given_up = True
            return self.otherwise(kept)
        self._was_right = True
        return results

    def _run(self, args: list[Any]) -> Sequence[Any]:
        if self._is_given_up:
            return self.otherwise(args)
        run = self.native.program(self) if self.native else None
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
        for step in self.steps:
            step.run(slots)
            for index in step.frees:
                slots[index] = None
        return [fill(o, slots) for o in self.outputs]

    @property
    def kernels(self) -> list[Step]:
        return [step for step in self.steps if step.generated]


def as_plain(value: Any) -> Any:
    """The value; a tensor of a subclass that does not intercept operators, as one of PyTorch's own class."""
    return value if is_plain(value) else without_subclass(value)


def is_plain(value: Any) -> bool:
    """Whether this is no tensor, or one that has memory of its own and is of PyTorch's own classes."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) or not isinstance(value, torch.Tensor)
