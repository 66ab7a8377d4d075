"""A case built once, and its implementations by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewright.records.case import Case

if TYPE_CHECKING:
    import torch
    from torch import fx

    from tilewright.backend import Recording


class Subject:
    """A case built once, its inputs, and its implementations by name."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        import torch

        from tilewright.backend import Recording
        from tilewright.measure.inputs import make_inputs, on_device

        self.case = case
        torch.manual_seed(0)
        self.device = device
        self.model = on_device(case.build(), device)
        self.inputs = make_inputs(case, seed=0, device=device, requires_grad=case.training)
        self.recording: Recording = Recording()
        torch._dynamo.reset()
        self.functions: dict[str, Callable[..., Any]] = {
            "eager": self.model,
            "eager-sdpa": torch.compile(self.model, backend=_eager_with_sdpa, dynamic=False),
            "inductor": torch.compile(self.model, dynamic=False),
            "tilewright": torch.compile(self.model, backend=self._backend, dynamic=False),
        }
        if torch.device(device).type == "cuda":
            self.functions |= {
                "inductor-reduce-overhead": torch.compile(self.model, mode="reduce-overhead", dynamic=False),
                "tilewright-reduce-overhead": torch.compile(
                    self.model, backend=self._backend, mode="reduce-overhead", dynamic=False
                ),
            }
        if not case.training:
            self.functions["inductor-out"] = self._into_warm_output(
                torch.compile(_written_to(self.model), dynamic=False)
            )
        self.gradients: list[torch.Tensor] | None = None

    def _backend(self, module: Any, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        from tilewright import backend

        with backend.recording() as record:
            compiled = backend.backend(module, inputs, **options)
        self.recording.graphs += record.graphs
        self.recording.decisions += record.decisions
        self.recording.fallbacks += record.fallbacks
        return compiled

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
                function(*self.inputs)
            return
        results = [t for t in tensors_in(function(*self.inputs)) if t.requires_grad]
        if self.gradients is None:
            self.gradients = [torch.randn_like(t) for t in results]
        if results:
            torch.autograd.backward(results, self.gradients)
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        import torch

        parameters = self.model.parameters() if isinstance(self.model, torch.nn.Module) else ()
        for tensor in (*self.inputs, *parameters):
            tensor.grad = None


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


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor inside tuples, lists and dicts, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]
