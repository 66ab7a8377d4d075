"""Compiled graphs that need only autograd of what AOTAutograd wraps around them (private parts of torch 2.11 to 2.13).

Those wrappers are Python, and cost a small graph more than its kernels: about 15 µs a forward and 20 µs a backward. For
a graph that changes no input, returns no alias and holds no symbols, tokens or subclasses, they only record autograd's
node; the executor does that in C++ (`launch/native/compiled_call.h`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import OutputType, PlainTensorMeta, ViewAndMutationMeta

from tilewright.graph.undefined import tangents_of
from tilewright.records.recipe import Layout

if TYPE_CHECKING:
    from tilewright.graph.capture import Boxed


@dataclass(frozen=True)
class Autograd:
    """How autograd records a call of a forward graph. Its results are followed by the tensors that backward takes."""

    differentiable: tuple[bool, ...]
    """For each result."""
    detached: tuple[int, ...]
    """Inputs with a history to which no gradient goes."""
    tangents: tuple[tuple[int, Layout], ...]
    """Each incoming gradient of backward: of which result, and how it lies."""
    checked: int
    """Tensors saved for backward that must not have changed by then."""
    unchecked: int
    """Further saved tensors."""
    refuses_determinism: bool
    """Whether backward must not run under `torch.use_deterministic_algorithms(True)`."""


@dataclass(frozen=True)
class PlainCall:
    """A call that only runs its graph and, unless it is for inference, lets autograd record that."""

    inputs: int
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
    """Of inputs and of what forward computed: a result whose `grad_fn` is AOTAutograd's node."""
    disables_autocast: bool
    """Whether casts of `torch.autocast` are part of the graphs."""


def plain_call(
    metadata: ViewAndMutationMeta, inputs: int, forward: fx.Graph, backward: fx.Graph | None
) -> PlainCall | None:
    """What a call of these graphs does for `inputs` arguments; None where it needs AOTAutograd's wrappers.

    `backward` takes all incoming gradients.
    """
    placeholders = [node.meta.get("val") for node in forward.find_nodes(op="placeholder")]
    # Where there are fewer, inputs were merged: they are views of each other, or given twice.
    if not len(placeholders) == len(metadata.input_info) == inputs or not all(map(_is_static, placeholders)):
        return None
    if _needs_wrappers(metadata):
        return None
    if backward is None:
        return PlainCall(inputs, None)
    autograd = _autograd(metadata, forward, backward)
    return None if autograd is None else PlainCall(inputs, autograd)


def _needs_wrappers(metadata: ViewAndMutationMeta) -> bool:
    aliases = metadata.num_outputs_aliased or metadata.num_intermediate_bases
    changes = metadata.num_mutated_inp_runtime_indices or metadata.mutated_graph_handled_indices_seen_by_autograd
    changes = changes or metadata.indices_of_inputs_that_requires_grad_with_mutations_in_bw
    changes = changes or any(x.mutates_metadata or x.mutation_inductor_storage_resize for x in metadata.input_info)
    tokens = metadata.tokens or metadata.num_backward_tokens
    random = metadata.is_rng_op_functionalized or metadata.num_graphsafe_rng_states
    symbols = metadata.dynamic_outputs or metadata.num_symints_saved_for_bw
    leaves = (*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta, *metadata.subclass_tangent_meta)
    subclasses = metadata.num_opaque_objects_saved_for_bw or not all(isinstance(x, PlainTensorMeta) for x in leaves)
    sets_mode = metadata.grad_enabled_mutation is not None
    return bool(aliases or changes or tokens or random or symbols or subclasses or sets_mode)


def _autograd(metadata: ViewAndMutationMeta, forward: fx.Graph, backward: fx.Graph) -> Autograd | None:
    infos = metadata.output_info
    values = list(forward.output_node().args[0])  # type: ignore[arg-type]
    results, unchecked = values[: len(infos)], metadata.num_tensors_saved_with_no_vc_check or 0
    saved = values[len(infos) :]
    tangents = [i for i, info in enumerate(infos) if _has_tangent(info)]
    layouts = [_layout(value) for value in tangents_of(backward).values() if _is_static(value)]
    gradients = backward.output_node().args[0]
    assert isinstance(gradients, (list, tuple))
    are_tensors = all(isinstance(node, fx.Node) and _is_static(node.meta.get("val")) for node in saved)
    is_one_each = len(layouts) == len(tangents) and len(gradients) == len(metadata.input_info)
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
        tangents=tuple(zip(tangents, layouts, strict=True)),
        checked=len(saved) - unchecked,
        unchecked=unchecked,
        refuses_determinism=metadata.deterministic is False,
    )


def _has_tangent(info: Any) -> bool:
    kinds = OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view
    return info.output_type in kinds and issubclass(info.raw_type, torch.Tensor) and info.requires_grad


def _is_static(value: object) -> bool:
    """Whether this is a tensor in memory whose sizes and strides are numbers."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return all(isinstance(number, int) for number in (*value.shape, *value.stride()))


def _layout(value: torch.Tensor) -> Layout:
    return Layout(tuple(value.shape), tuple(value.stride()), value.dtype, value.device)


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
