"""Checks a compiled model's outputs and gradients against eager and float64, by the numbers contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tilewright.measure.truth.conditioning import other_results
from tilewright.measure.truth.contract import compare
from tilewright.measure.truth.reference import copies, reference_run
from tilewright.measure.truth.written import after_the_call, are_equal, is_after, module_state, restored, told_apart
from tilewright.pytorch.state import without_onednn
from tilewright.records.case import named_leaves
from tilewright.records.measurement import Verified

if TYPE_CHECKING:
    import torch
    from torch import fx

    from tilewright.measure.truth.written import State

Model = Callable[..., Any]


def verify(
    model: Model, compiled: Model, inputs: Sequence[Any], *, seed: int = 0, training: bool = True
) -> list[Verified]:
    """One row for every output and written tensor and, with `training`, for every gradient of an input or parameter.

    `compiled(*inputs)` is compared with `model(*inputs)` and with float64 (`reference_run`). All runs start from
    the same state of the generators, the same inputs, parameters and buffers, and the same random gradients of the
    outputs; the caller's generators, inputs, parameters, buffers and `.grad` do not change. Rows of inputs, parameters
    and buffers that either run wrote are named `input 1 after the call`. Gradients are those of the inputs that
    require one and of the trainable parameters, if `model` is a module.
    A row that breaks the contract has `ok=False`. Exceptions of the model pass through.
    """
    import torch

    tensors = [*(tensor for _, tensor in named_tensors(inputs, "")), *module_state(model).values()]
    devices = {t.device for t in tensors if t.device.type == "cuda"}
    with torch.random.fork_rng(sorted({d.index or 0 for d in devices})), torch.set_grad_enabled(training):
        eager = run_eager(model, inputs, seed=seed, training=training)
        ours = _run(model, compiled, inputs, eager.tangents, seed, training)
        joint = joint_graph(model, inputs, eager, seed=seed, training=training)
        truth = _truth(joint, eager, seed)
        rows = [*_rows(eager, ours, truth, "fwd", {}), *_rows(eager, ours, truth, "bwd", {})]
        others = other_results(joint.graph, joint.inputs, seed)
        # Each run can only widen the bounds.
        while not all(row.ok for row in rows) and (results := next(others, None)) is not None:
            near = dict(zip(joint.names, results, strict=True))
            rows = [*_rows(eager, ours, truth, "fwd", near), *_rows(eager, ours, truth, "bwd", near)]
    return rows


@dataclass(frozen=True)
class Results:
    """Tensors by name, and the gradients of the outputs that backward started from."""

    outputs: State
    written: State
    """Inputs, parameters and buffers after the call, of those that it wrote."""
    unwritten: State
    bwd: State
    tangents: Sequence[torch.Tensor]


def run_eager(model: Model, inputs: Sequence[Any], *, seed: int, training: bool) -> Results:
    """The model's own results and, with `training`, gradients; its state is as before afterwards."""
    return _run(model, model, inputs, None, seed, training)


def _rows(
    eager: Results,
    ours: Results,
    truth: State,
    direction: Literal["fwd", "bwd"],
    others: Mapping[str, Sequence[torch.Tensor]],
) -> Iterator[Verified]:
    expected, given = (eager.bwd, ours.bwd) if direction == "bwd" else _forward(eager, ours)
    for name in expected | given:
        if name in expected and name in given:
            true, near = truth.get(name, expected[name]), others.get(name, ())
            yield compare(given[name], expected[name], true, near, direction=direction, tensor=name)
        else:
            dtype = str((expected | given)[name].dtype).removeprefix("torch.")
            inf = float("inf")
            yield Verified(direction, name, dtype, inf, 0.0, inf, 0.0, 0.0, 0.0, ok=False)


def _forward(eager: Results, ours: Results) -> tuple[State, State]:
    """Outputs, and tensors after the call: those that eager wrote, and those that differ from what eager left alone."""
    after = ours.written | ours.unwritten
    both = {name: (t, after[name]) for name, t in (eager.written | eager.unwritten).items()}
    both = {name: pair for name, pair in both.items() if name in eager.written or not are_equal(*pair)}
    expected, given = ({name: pair[i] for name, pair in both.items()} for i in (0, 1))
    return eager.outputs | expected, ours.outputs | given


def _run(
    model: Model,
    function: Model,
    inputs: Sequence[Any],
    tangents: Sequence[torch.Tensor] | None,
    seed: int,
    training: bool,
) -> Results:
    import torch

    fresh = copies(inputs)
    with restored(model) as values:
        leaves = dict(_leaves(fresh)) | _parameters(model) if training else {}
        torch.manual_seed(seed)
        outputs = dict(named_tensors(function(*fresh), "output"))
        after = after_the_call(fresh, module_state(model))
        written, unwritten = told_apart(after_the_call(inputs, values), after)
        gradients, tangents = _backward(outputs | written, leaves, tangents, seed)
        kept = (_copied(outputs), _copied(written), _copied(unwritten))
    return Results(*kept, gradients, tangents)


def _copied(tensors: State) -> State:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _backward(
    outputs: State, leaves: State, tangents: Sequence[torch.Tensor] | None, seed: int
) -> tuple[State, Sequence[torch.Tensor]]:
    import torch

    # What was written to a parameter or to an input that requires a gradient has none itself.
    ends = [t for n, t in outputs.items() if t.requires_grad and not (is_after(n) and t.is_leaf)] if leaves else []
    if tangents is None:
        tangents = random_tangents(ends, seed)
    if not ends:
        return {}, tangents
    found = torch.autograd.grad(ends, list(leaves.values()), list(tangents), allow_unused=True)
    return {name: g for name, g in zip(leaves, found, strict=True) if g is not None}, tangents


def random_tangents(outputs: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Standard normal gradients of differentiable outputs, with which `verify` starts the backward."""
    import torch

    def draw(output: torch.Tensor, number: int) -> torch.Tensor:
        generator = torch.Generator(output.device).manual_seed(seed + number)
        return torch.randn(output.shape, dtype=output.dtype, device=output.device, generator=generator)

    return [draw(output, number) for number, output in enumerate(outputs)]


@dataclass(frozen=True)
class JointGraph:
    """A model's forward and backward as one ATen graph, its arguments, and the names of its results."""

    graph: fx.GraphModule
    inputs: Sequence[torch.Tensor]
    """The tensor inputs of the model, its parameters and buffers, and the gradients of its outputs."""
    names: Sequence[str]


def joint_graph(model: Model, inputs: Sequence[Any], eager: Results, *, seed: int, training: bool) -> JointGraph:
    """The operators that eager runs for `model(*inputs)` and, with `training`, for its gradients.

    The results are those of `eager`: outputs, what it wrote, and gradients. Attention is decomposed (the math backend),
    because fused attention has no float64 and hides its dropout mask. Where a tensor's value decides what runs next
    (`if mask.all()`), the graph has what ran for these inputs. Exceptions of the model pass through.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from tilewright.pytorch.tracing import traced

    state = module_state(model)
    moved = [i for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
    trainable = set(_parameters(model))
    names: list[str] = []

    def whole(*flat: torch.Tensor) -> list[torch.Tensor]:
        rest, values = list(flat), list(inputs)
        for i in moved:
            values[i] = _leaf(rest.pop(0), training and inputs[i].requires_grad)
        parameters = {name: _leaf(rest.pop(0), training and name in trainable) for name in state}
        leaves = dict(_leaves(values)) if training else {}
        leaves |= {n: parameters[n] for n in parameters if n in trainable} if training else {}
        returned, after = _call(model, parameters, values)
        after = after_the_call(values, after)
        outputs = dict(named_tensors(returned, "output")) | {name: after[name] for name in eager.written}
        gradients, _ = _backward(outputs, leaves, rest, seed)
        names[:] = [*outputs, *gradients]
        return [*outputs.values(), *gradients.values()]

    def arguments() -> list[torch.Tensor]:
        fresh = copies(inputs)
        return [*(fresh[i] for i in moved), *(t.detach().clone() for t in state.values()), *eager.tangents]

    # oneDNN's recurrent layers have no float64.
    with sdpa_kernel(SDPBackend.MATH), without_onednn():
        torch.manual_seed(seed)
        graph = traced(whole, arguments())
    return JointGraph(graph, arguments(), names)


def _truth(joint: JointGraph, eager: Results, seed: int) -> State:
    import torch

    torch.manual_seed(seed)
    results = reference_run(joint.graph, joint.inputs)
    true = {name: pair.truth for name, pair in zip(joint.names, results, strict=True)}
    return {name: true[name] for name in (*eager.outputs, *eager.written, *eager.bwd)}


def _call(model: Model, state: State, inputs: Sequence[Any]) -> tuple[Any, State]:
    """What the model returns with other parameters and buffers, and these after the call."""
    import torch

    if not isinstance(model, torch.nn.Module):
        return model(*inputs), {}

    class WithState(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self) -> tuple[Any, State]:
            return model(*inputs), module_state(model)

    given = {f"model.{name}": tensor for name, tensor in state.items()}
    returned: tuple[Any, State] = torch.func.functional_call(WithState(), given)
    return returned


def _leaf(tensor: torch.Tensor, differentiable: bool) -> torch.Tensor:
    return tensor.detach().requires_grad_(differentiable)


def named_tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor inside tuples, lists, mappings and dataclasses, with its path: `output[0]`, `output['loss']`.

    >>> import torch
    >>> [name for name, _ in named_tensors({"a": torch.ones(1), "b": [torch.ones(1), 3]}, "output")]
    ["output['a']", "output['b'][0]"]
    """
    yield from named_leaves(value, name)


def _leaves(inputs: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, value in enumerate(inputs):
        if getattr(value, "requires_grad", False):
            yield f"input {index}", value


def _parameters(model: Model) -> State:
    import torch

    if not isinstance(model, torch.nn.Module):
        return {}
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
