"""A case built once, and its implementations by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from tilewright.records.case import Case, leaves
from tilewright.records.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import fx

    from tilewright.backend import Recording
    from tilewright.measure.inputs import Arguments
    from tilewright.records.measurement import Verified


class Subject:
    """A case built once, the tensors among its arguments, and its implementations by name, functions of these tensors.

    Raises InputError if the model fails on its inputs.
    """

    def __init__(self, case: Case, device: str = "cpu") -> None:
        import torch

        from tilewright.backend import Recording, backend, recording
        from tilewright.measure.inputs import make_arguments, note_training_mode, on_device
        from tilewright.pytorch.compiler import forget_compiled

        self.case = case
        _expect_no_cuda()
        torch.manual_seed(0)
        self.device = device
        model = on_device(case.build(), device)
        note_training_mode(case, model)
        self.arguments = make_arguments(case, seed=0, device=device, requires_grad=case.training)
        self.inputs = self.arguments.tensors
        self.model = model if self.arguments.are_flat else _of_tensors(model, self.arguments)
        self.recording: Recording = Recording()
        forget_compiled()

        def recorded(module: Any, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
            with recording() as record:
                compiled = backend(module, inputs, **options)
            self.recording.graphs += record.graphs
            self.recording.decisions += record.decisions
            self.recording.fallbacks += record.fallbacks
            return compiled

        # Dynamo's name for what a backend wraps: skipped functions are reported for that one.
        vars(recorded)["_torchdynamo_orig_backend"] = backend

        def compiled(**options: Any) -> Callable[..., Any]:
            function: Callable[..., Any] = torch.compile(model, dynamic=False, **options)
            return function if self.arguments.are_flat else partial(_call, self.arguments, function)

        self.functions: dict[str, Callable[..., Any]] = {
            "eager": self.model,
            "eager-sdpa": compiled(backend=_eager_with_sdpa),
            "inductor": compiled(),
            "tilewright": compiled(backend=recorded),
        }
        if torch.device(device).type == "cuda":
            self.functions |= {
                "inductor-reduce-overhead": compiled(mode="reduce-overhead"),
                "tilewright-reduce-overhead": compiled(backend=recorded, mode="reduce-overhead"),
            }
        if not case.training:
            self.functions["inductor-out"] = self._into_warm_output(
                torch.compile(_written_to(self.model), dynamic=False)
            )
        self.gradients: list[torch.Tensor] | None = None
        self.has_results = False
        """Whether the last call returned a tensor."""
        self._check_inputs()

    def _check_inputs(self) -> None:
        """What eager refuses is the model's fault or the inputs', and no compiler's."""
        from tilewright.case_names import error_location

        try:
            self.call("eager")
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
            line = error_location(error)
            hint = "; --inputs gives integers a range, as in i64[B=4]<1" if isinstance(error, LookupError) else ""
            raise InputError(f"{self.case.name} fails on its inputs {line}{hint}") from error

    def _into_warm_output(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The peer, writing its result to memory that is already mapped."""
        held: list[torch.Tensor] = []

        def call(*inputs: torch.Tensor) -> Any:
            if not held:
                held.extend(t.clone() for t in tensors_in(self.model(*inputs)))
            return function(held, *inputs)

        return call

    def call(self, impl: str) -> None:
        """One step: forward, and backward in training; results and gradients are dropped."""
        import torch

        function = self.functions[impl]
        if not self.case.training:
            with torch.no_grad():
                self.has_results = bool(tensors_in(function(*self.inputs)))
            return
        returned = tensors_in(function(*self.inputs))
        self.has_results = bool(returned)
        results = [t for t in returned if t.requires_grad]
        if self.gradients is None:
            self.gradients = [torch.randn_like(t) for t in results]
        if results:
            torch.autograd.backward(results, self.gradients)
        self._drop_gradients()

    def compile(self, impl: str) -> None:
        """The first call. Noted are also the functions that Dynamo skips before it calls a backend."""
        from tilewright.backend import recording

        with recording() as record:
            self.call(impl)
        self.recording.fallbacks += record.fallbacks

    def verified(self, impl: str) -> list[Verified]:
        """The results and gradients of an implementation beside eager's and those of float64 (`verify`)."""
        from tilewright.measure.truth.verify import verify

        return verify(self.model, self.functions[impl], self.inputs, seed=1, training=self.case.training)

    def _drop_gradients(self) -> None:
        import torch

        parameters = self.model.parameters() if isinstance(self.model, torch.nn.Module) else ()
        for tensor in (*self.inputs, *parameters):
            tensor.grad = None


@cache
def _expect_no_cuda() -> None:
    """Drop the warning with which Inductor finds a CUDA toolkit but no GPU: nothing asked for one."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    logger.addFilter(lambda record: "No CUDA runtime is found" not in record.getMessage())


def _eager_with_sdpa(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Eager, but with attention as `scaled_dot_product_attention`: the best that a user writes by hand."""
    import torch

    from tilewright.hardware.target import target_of
    from tilewright.passes.attention.recognise import recognise_attention

    device = next((x.device for x in inputs if isinstance(x, torch.Tensor)), torch.device("cpu"))
    recognise_attention(module.graph, target_of(device))
    module.recompile()
    return module.forward


def _written_to(model: Callable[..., Any]) -> Callable[..., None]:
    def call(out: list[torch.Tensor], *inputs: torch.Tensor) -> None:
        for held, result in zip(out, tensors_in(model(*inputs)), strict=True):
            held.copy_(result)

    return call


def _call(arguments: Arguments, function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    return arguments.call(function, tensors)


def _of_tensors(model: Callable[..., Any], arguments: Arguments) -> Callable[..., Any]:
    """`model` as a function of the tensors among its arguments; a module's parameters keep their names."""
    import torch

    if not isinstance(model, torch.nn.Module):
        return partial(_call, arguments, model)

    class OfTensors(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("_parameters", "_buffers", "_modules", "training"):
                vars(self)[name] = vars(model)[name]

        def forward(self, *tensors: torch.Tensor) -> Any:
            return arguments.call(model, tensors)

    return OfTensors()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor inside tuples, lists, mappings and dataclasses, in order."""
    return list(leaves(value))
