"""Compiles forward and backward of one program together, and connects AOTAutograd's hooks with the programs on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import fx

from tilewright.capture.aot import Boxed, CallableGraph, Compiler, Kind
from tilewright.capture.input_names import rename_inputs
from tilewright.capture.partition import cut, draws
from tilewright.graph.undefined import (
    BackwardByGradients,
    copied,
    expected_undefined,
    insert_zeros,
    is_tangent,
    leave_out,
    leave_undefined,
)
from tilewright.pytorch.state import autocasts, compiled_autograd_is_on, saved_tensors_hooked
from tilewright.records.errors import CaptureError
from tilewright.records.outcomes import Outcome

if TYPE_CHECKING:
    from tilewright.capture.plain_call import PlainCall, Resumable
    from tilewright.capture.program_cache import KeptProgram


@dataclass
class GraphPair:
    """Compiles forward and backward together in AOTAutograd's partitioner; its compiler hooks then return each."""

    compiler: Compiler
    inputs: int
    names: Sequence[str] = ()
    """What the user calls the inputs; empty if that is not known."""
    is_symbolic: bool = False
    """Whether sizes are symbolic."""
    is_kept: bool = False
    """Whether AOTAutograd's entry is kept: it reads the metadata of the backward graph that it is given."""
    compiled: Sequence[Boxed] = ()
    """Forward and backward."""
    undefined: Sequence[int] = ()
    """Indices, among the inputs of backward, of the gradients that the compiled backward does not take."""
    tangents: Sequence[int] = ()
    """The places of all gradients that come in, where some of several may be undefined."""
    backward_graph: fx.GraphModule | None = None
    """The graph of the compiled backward."""
    whole: fx.GraphModule | None = None
    """The backward with all gradients as it was traced, until it is packed."""
    packed: bytes | None = None
    """The same."""
    static: Sequence[int] = ()
    plain: PlainCall | None = None
    """How a call runs the compiled graphs if it does not need AOTAutograd's wrappers."""
    draws: bool = False
    """Whether the forward graph draws random numbers."""
    written: Sequence[bool] = ()
    """For each input of the program, whether a call changes its elements."""
    runs: dict[Kind, Boxed] = field(default_factory=dict)
    """The compiled graphs as AOTAutograd calls them."""

    def partition(
        self, joint: fx.GraphModule, _joint_inputs: object, *, num_fwd_outputs: int, **_: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        rename_inputs(joint.graph, self.names)
        self.compiler.rewriter.joint(joint.graph)
        forward, backward = cut(joint, num_fwd_outputs, self.compiler.rewriter.saved)
        self.backward_graph = backward
        self.tangents = [] if compiled_autograd_is_on() else insert_zeros(backward.graph)
        self.whole = copied(backward)
        if self.is_kept:
            from tilewright.capture.packed import pack_or_none

            self.packed = pack_or_none(backward.graph, symbolic=self.is_symbolic)
        self.undefined = expected_undefined(backward.graph, self.tangents)
        leave_out(backward.graph, self.undefined)
        self.compiled = self.compiler.compile({"forward": forward, "backward": backward})
        # AOTAutograd removes what nothing reads.
        return forward, copied(self.whole)

    def whole_backward(self) -> fx.GraphModule:
        """The backward with all gradients, not planned yet."""
        from tilewright.capture.packed import unpack

        if self.whole is not None:
            return self.whole
        assert self.packed is not None
        whole: fx.GraphModule = unpack(self.packed).owning_module
        return whole

    def forward(self, gm: fx.GraphModule, example_inputs: object) -> Boxed:
        assert self.compiled
        self._note_written()
        self.static = _static_inputs()
        _keep_saved_tensors()
        self.draws = any(map(draws, gm.graph.nodes))
        self._note_plain(gm.graph, self.whole_backward().graph)
        if self.packed is not None:
            self.whole = None
        return self._forward(CallableGraph(gm, "forward", self.static), self.compiled[0])

    def _forward(self, graph: CallableGraph, run: Boxed) -> Resumable:
        from tilewright.capture.plain_call import Resumable

        self.runs[graph.kind] = made = Resumable(self.compiler.wrap_replay(graph, run))
        return made

    def backward(self, gm: fx.GraphModule, example_inputs: object) -> Boxed:
        from torch._dynamo import disable

        # Dynamo may be tracing the user's call of backward.
        untraced: Boxed = disable(self._compiled_backward(), reason="it is compiled already")
        return untraced

    def _compiled_backward(self) -> Boxed:
        if "backward" in self.runs:
            return self.runs["backward"]
        assert self.compiled and self.backward_graph is not None
        return self._backward(self.backward_graph, self.compiled[1])

    def _backward(self, graph: fx.GraphModule, run: Boxed) -> Boxed:
        run = self._repeated(graph, run)
        if self.tangents:
            run = BackwardByGradients(self.tangents, {frozenset(self.undefined): run}, self._compile_without)
        self.runs["backward"] = made = _boxed(run)
        return made

    def _compile_without(self, places: frozenset[int]) -> Boxed:
        """Backward without the gradients at these places."""
        backward = copied(self.whole_backward())
        leave_out(backward.graph, places)
        return self._repeated(backward, self.compiler.compile({"backward": backward})[0])

    def _repeated(self, backward: fx.GraphModule, run: Boxed) -> Boxed:
        inputs = backward.graph.find_nodes(op="placeholder")
        saved = [place for place, node in enumerate(inputs) if not is_tangent(node)]
        return self.compiler.wrap_replay(CallableGraph(backward, "backward", saved), run)

    def inference(self, gm: fx.GraphModule, example_inputs: object) -> Boxed:
        self._note_written()
        rename_inputs(gm.graph, self.names)
        self.compiler.rewriter.joint(gm.graph)
        (run,) = self.compiler.compile({"forward": gm})
        self.static = _static_inputs()
        self._note_plain(gm.graph, None)
        return self._forward(CallableGraph(gm, "inference", self.static), run)

    def _note_written(self) -> None:
        from torch._guards import TracingContext

        context = TracingContext.try_get()
        if context and context.fw_metadata:
            self.written = [info.mutates_data for info in context.fw_metadata.input_info]
            # AOTAutograd merges them into one, and reads where they begin from the inputs that it traced.
            if len(self.written) < self.inputs:
                raise CaptureError("it writes to an input that shares memory with another one")
            # Tensors that the captured module holds itself come first, and calls do not pass them.
            self.written = self.written[len(self.written) - self.inputs :]

    def _note_plain(self, forward: fx.Graph, backward: fx.Graph | None) -> None:
        from torch._guards import TracingContext

        from tilewright.capture.plain_call import plain_call

        context = TracingContext.try_get()
        if context and context.fw_metadata and not saved_tensors_hooked() and not compiled_autograd_is_on():
            self.plain = plain_call(context.fw_metadata, self.inputs, forward, backward)

    def callable_of(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The callable for Dynamo; `compiled` is AOTAutograd's."""
        called = self._callable_of(compiled)
        return self.compiler.guard_written(called, self.written) if any(self.written) else called

    def _callable_of(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        from tilewright.capture.plain_call import Called, marks

        has_backward, second = "forward" in self.runs, None
        otherwise = _with_undefined_gradients(compiled) if self.tangents else compiled
        if has_backward and (second := self.compiler.second_derivative(self._obstacle())) is not None:
            otherwise = second.watched(otherwise)
        if self.plain is None:
            return otherwise
        forward: Any = self.runs["forward" if has_backward else "inference"]
        return self.compiler.wrap_entry(
            Called(
                plain=self.plain,
                forward=forward.run,
                backward=self._compiled_backward() if has_backward else None,
                undefined=tuple(self.tangents),
                otherwise=otherwise,
                stand_in=partial(forward.resumed, otherwise),
                mark=marks(self.plain),
                second=second,
                disables_autocast=autocasts(),
            )
        )

    def _obstacle(self) -> str:
        if self.draws:
            return "the call drew random numbers"
        return "" if self.plain is not None else "the call wrote to an input, or returned a view"

    def program(self, compiled: Any, looked_up: Mapping[str, Outcome | None]) -> KeptProgram | None:
        """The compiled program as data; None if the compiler or AOTAutograd cannot describe it. Raises CaptureError."""
        from tilewright.capture import aot_entry, packed
        from tilewright.capture.program_cache import KeptProgram

        planned, made = self.compiler.plan_to_keep(), aot_entry.entry_of(compiled)
        if planned is None or made is None:
            return None
        plan, graphs = planned
        entry, guards = made
        if len(graphs) > 1 and self.packed is None:
            raise CaptureError("its backward cannot be packed")
        state = (
            plan,
            list(graphs),
            list(self.static),
            list(self.undefined),
            self.tangents,
            self.plain,
            self.written,
            self.draws,
        )
        content = packed.pack(state, graphs, symbolic=self.is_symbolic)
        return KeptProgram(entry, content, self.packed, dict(looked_up), guards if self.is_symbolic else None)

    def restored(self, state: Any) -> dict[Kind, Boxed]:
        """The functions of a program, from what `program` packed."""
        plan, graphs, self.static, self.undefined, self.tangents, self.plain, self.written, self.draws = state
        runs = self.compiler.compile_planned(plan)
        first: Kind = "inference" if len(graphs) == 1 else "forward"
        graph = CallableGraph(graphs[0].owning_module, first, self.static)
        self._forward(graph, runs[0])
        if len(graphs) > 1:
            self._backward(graphs[1].owning_module, runs[1])
        return self.runs


def _with_undefined_gradients(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        results = compiled(*args)
        leave_undefined(results)
        return results

    return call


def _static_inputs() -> Sequence[int]:
    """Indices of parameters and buffers among the inputs of the forward graph that is being compiled."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return context.fw_metadata.static_input_indices if context and context.fw_metadata else ()


def _keep_saved_tensors() -> None:
    """Backward overwrites nothing that forward saved: PyTorch may run it several times."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context and context.fw_metadata:
        context.fw_metadata.bw_donated_idxs = []


def _boxed(function: Boxed) -> Boxed:
    """Mark a function that takes its arguments as a list and may empty it. Dynamo traces nothing of its calls.

    The frame of a compiled training step may call backward.
    """
    from torch._C._dynamo import eval_frame

    def call(args: list[Any]) -> Sequence[Any]:
        return function(args)

    skip = eval_frame._FrameAction.SKIP
    # Dynamo skips the frame itself, and the frames that it calls.
    eval_frame.set_code_exec_strategy(call.__code__, eval_frame._FrameExecStrategy(skip, skip))
    call._boxed_call = True  # type: ignore[attr-defined]
    return call
