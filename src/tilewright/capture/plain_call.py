"""Compiled graphs that need only autograd of what AOTAutograd wraps around them (private parts of torch 2.11 to 2.13).

Those wrappers are Python, and cost a small graph more than its kernels: about 15 µs a forward and 20 µs a backward. For
a graph that changes no input, returns no alias and holds no tokens or subclasses, they only record autograd's
node; the executor does that in C++ (`launch/native/compiled_call.h`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, OutputType, PlainTensorMeta, ViewAndMutationMeta

if TYPE_CHECKING:
    from tilewright.capture.aot import Boxed
    from tilewright.capture.second_derivative import SecondDerivative


@dataclass(frozen=True)
class Autograd:
    """How autograd records a call of a forward graph. Its results are followed by the tensors that backward takes."""

    differentiable: tuple[bool, ...]
    """For each result."""
    detached: tuple[int, ...]
    """Inputs with a history to which no gradient goes."""
    tangents: tuple[tuple[int, tuple[int, ...] | torch.memory_format], ...]
    """Each incoming gradient of backward: of which result, and its strides, or how it lies where sizes change."""
    numbers: int
    """Saved numbers, the last of what is saved; backward takes them first."""
    checked: int
    """Tensors saved for backward that must not have changed by then."""
    unchecked: int
    """Tensors saved without that check."""
    refuses_determinism: bool
    """Whether backward must not run under `torch.use_deterministic_algorithms(True)`."""


@dataclass(frozen=True)
class PlainCall:
    """A call that only runs its graph and, unless it is for inference, lets autograd record that."""

    are_tensors: tuple[bool, ...]
    """For each input; others are numbers."""
    changing: tuple[tuple[int, frozenset[int]], ...]
    """Results of which Dynamo should know that sizes change, and the axes."""
    autograd: Autograd | None


@dataclass(frozen=True)
class Called:
    """The parts of a callable: compiled graphs, and AOTAutograd's own callable around them."""

    plain: PlainCall
    forward: Boxed
    backward: Boxed | None
    undefined: Sequence[int]
    """Places of the gradients among the inputs of backward for which it takes None."""
    otherwise: Callable[..., Any]
    stand_in: Callable[[list[torch.Tensor], list[torch.Tensor]], torch.Tensor]
    """Makes a tensor whose `grad_fn` is AOTAutograd's node from the inputs and forward's results."""
    mark: Callable[[Sequence[torch.Tensor]], None] | None
    """Tells Dynamo which sizes of the results change."""
    second: SecondDerivative | None
    """Gives gradients their history; None for inference."""
    disables_autocast: bool
    """Whether casts of `torch.autocast` are part of the graphs."""


def plain_call(
    metadata: ViewAndMutationMeta, inputs: int, forward: fx.Graph, backward: fx.Graph | None
) -> PlainCall | None:
    """The plan of a call of these graphs with `inputs` arguments; None if it needs AOTAutograd's wrappers.

    `backward` takes all incoming gradients.
    """
    placeholders = [node.meta.get("val") for node in forward.find_nodes(op="placeholder")]
    # Where there are fewer, inputs were merged: they are views of each other, or given twice.
    if not len(placeholders) == len(metadata.input_info) == inputs or not all(map(_is_value, placeholders)):
        return None
    if _needs_wrappers(metadata):
        return None
    autograd = None if backward is None else _autograd(metadata, forward, backward)
    if backward is not None and autograd is None:
        return None
    are_tensors = tuple(isinstance(value, torch.Tensor) for value in placeholders)
    results = enumerate(metadata.output_info)
    changing = tuple((i, frozenset(info.dynamic_dims)) for i, info in results if info.dynamic_dims)
    return PlainCall(are_tensors, changing, autograd)


def marks(plain: PlainCall) -> Callable[[Sequence[torch.Tensor]], None] | None:
    """A function that tells Dynamo which sizes of the results change; None if none do."""
    if not plain.changing:
        return None
    changing = [(place, set(axes)) for place, axes in plain.changing]
    # The function's names in PyTorch 2.13 and 2.11.
    known: Any = runtime_wrappers
    mark = getattr(known, "mark_dynamo_propagated_dynamic_indices", None) or known.maybe_mark_dynamic_helper

    def mark_all(results: Sequence[torch.Tensor]) -> None:
        for place, axes in changing:
            mark(results[place], axes)

    return mark_all


def _needs_wrappers(metadata: ViewAndMutationMeta) -> bool:
    aliases = metadata.num_outputs_aliased or metadata.num_intermediate_bases
    changes = metadata.num_mutated_inp_runtime_indices or metadata.mutated_graph_handled_indices_seen_by_autograd
    changes = changes or metadata.indices_of_inputs_that_requires_grad_with_mutations_in_bw
    changes = changes or any(x.mutates_metadata or x.mutation_inductor_storage_resize for x in metadata.input_info)
    tokens = metadata.tokens or metadata.num_backward_tokens
    random = metadata.is_rng_op_functionalized or metadata.num_graphsafe_rng_states
    leaves = (*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta, *metadata.subclass_tangent_meta)
    subclasses = metadata.num_opaque_objects_saved_for_bw or not all(isinstance(x, PlainTensorMeta) for x in leaves)
    sets_mode = metadata.grad_enabled_mutation is not None
    return bool(aliases or changes or tokens or random or subclasses or sets_mode)


def _autograd(metadata: ViewAndMutationMeta, forward: fx.Graph, backward: fx.Graph) -> Autograd | None:
    infos = metadata.output_info
    values = list(forward.output_node().args[0])  # type: ignore[arg-type]
    results, saved = values[: len(infos)], values[len(infos) :]
    unchecked, numbers = metadata.num_tensors_saved_with_no_vc_check or 0, metadata.num_symints_saved_for_bw or 0
    checked = len(saved) - unchecked - numbers
    tangents = [i for i, info in enumerate(infos) if _has_tangent(info)]
    lies = [_layout(found.memory_format) for found in metadata.subclass_tangent_meta if found.memory_format]
    gradients = backward.output_node().args[0]
    assert isinstance(gradients, (list, tuple))
    are_tensors = all(isinstance(node.meta.get("val"), torch.Tensor) for node in saved[: checked + unchecked])
    is_one_each = len(lies) == len(tangents) and len(gradients) == len(metadata.input_info)
    tracked = [results[i] for i, info in enumerate(infos) if info.requires_grad]
    are_new = len(set(tracked)) == len(tracked) and all(node.op == "call_function" for node in tracked)
    # PyTorch 2.13 tells results that require gradients from those that backward takes gradients for.
    agree = all(info.requires_grad == getattr(info, "requires_grad_for_backward", info.requires_grad) for info in infos)
    if not (are_tensors and is_one_each and are_new and agree):
        return None
    ends = [i for i, info in enumerate(metadata.input_info) if info.requires_grad and not info.is_leaf]
    return Autograd(
        differentiable=tuple(info.requires_grad for info in infos),
        detached=tuple(i for i in ends if gradients[i] is None),
        tangents=tuple(zip(tangents, lies, strict=True)),
        numbers=numbers,
        checked=checked,
        unchecked=unchecked,
        refuses_determinism=metadata.deterministic is False,
    )


def _has_tangent(info: Any) -> bool:
    kinds = OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view
    return info.output_type in kinds and issubclass(info.raw_type, torch.Tensor) and info.requires_grad


def _layout(described: MemoryFormatMeta) -> tuple[int, ...] | torch.memory_format:
    if described.memory_format is not None:
        return described.memory_format
    assert described.stride is not None
    return tuple(described.stride)


def _is_value(value: object) -> bool:
    """Whether this is a number, or a tensor in memory."""
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat))


class Resumable:
    """A compiled forward as AOTAutograd calls it; `resumed` lets one call take what was computed already."""

    _boxed_call = True

    def __init__(self, run: Boxed) -> None:
        self.run = run
        self._here = threading.local()

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        computed: list[torch.Tensor] | None = self._here.__dict__.pop("computed", None)
        return self.run(args) if computed is None else computed

    def resumed(
        self, function: Callable[..., Any], inputs: list[torch.Tensor], computed: list[torch.Tensor]
    ) -> torch.Tensor:
        """A result of `function`, which calls this, that has a history."""
        self._here.computed = computed
        try:
            results: Sequence[torch.Tensor] = function(*inputs)
        finally:
            self._here.__dict__.pop("computed", None)
        return next(x for x in results if isinstance(x, torch.Tensor) and x.grad_fn is not None)
