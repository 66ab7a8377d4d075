"""Serialises AOTAutograd's wrappers of compiled graphs (private modules of torch 2.11 to 2.13).

AOTAutograd's wrappers (mutations, views of inputs and results, autograd) can be pickled: its own cache does so with
Inductor's code. Here the code is `CompiledCode`, which only names the graph that it runs; `wrapped` gets the function
that runs it. PyTorch's cache writes nothing: `prepare_for_serialization` refuses, and the entry that it would have
written is kept.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch import config
from torch._functorch._aot_autograd import collect_metadata_analysis
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._inductor import config as inductor
from torch._inductor.output_code import OutputCode

from tilewright.capture import in_place
from tilewright.capture.aot import Boxed, Kind
from tilewright.records.errors import CaptureError


@dataclass
class CompiledCode(OutputCode):
    """A compiled graph as AOTAutograd holds it."""

    kind: Kind
    run: Boxed
    _boxed_call: bool = True
    """An attribute of the instance, from which `functools.wraps` copies it."""

    def __call__(self, args: Any) -> Sequence[Any]:
        return self.run(args)

    def prepare_for_serialization(self) -> None:
        raise BypassAOTAutogradCache("tilewright keeps it itself")

    def post_compile(self, *_: object) -> None:
        """Nothing is left to do."""

    def set_triton_bundle(self, triton_bundle: object) -> None:
        """Triton's own cache has the kernels."""


def plain(
    forward: Callable[..., Boxed], backward: Callable[..., Boxed], inference: Callable[..., Boxed]
) -> dict[str, Any]:
    """The functions that compile, as arguments of `aot_module_simplified`."""
    return {"fw_compiler": forward, "bw_compiler": backward, "inference_compiler": inference}


def compilers(
    forward: Callable[..., Boxed], backward: Callable[..., Boxed], inference: Callable[..., Boxed]
) -> dict[str, Any]:
    """The same, such that AOTAutograd can report its entry."""

    def code(kind: Kind, compile: Callable[..., Boxed]) -> Callable[..., Any]:
        return lambda gm, inputs: CompiledCode(kind, compile(gm, inputs))

    made: Any = SerializableAOTDispatchCompiler(CompiledCode, code("forward", forward))
    return {
        "fw_compiler": made,
        "bw_compiler": lambda gm, inputs: _untraced(CompiledCode("backward", backward(gm, inputs))),
        "inference_compiler": code("inference", inference),
    }


def _untraced(code: CompiledCode) -> Any:
    from torch._dynamo import disable

    # Dynamo may be tracing the user's call of backward.
    return disable(code, reason="it is compiled already")


@contextmanager
def as_eager() -> Iterator[None]:
    """Let AOTAutograd trace what eager does where its defaults differ.

    It drops draws that nothing reads, so that later draws differ from eager's, unless Inductor's option says otherwise.
    It traces backward under the autocast that is around the call, though `backward()` is called outside of it. It
    forgets the strides of tensors that are written in place. And it takes the gradient of a conjugated result for
    conjugated, so that backward reads another one than it gets.
    """
    backward_autocast = "off" if config.backward_pass_autocast == "same_as_forward" else config.backward_pass_autocast
    as_called = config.patch({"backward_pass_autocast": backward_autocast})
    with as_called, inductor.patch({"fallback_random": True}), in_place.as_eager(), _plain_gradients():
        yield


@contextmanager
def _plain_gradients() -> Iterator[None]:
    """Trace the gradients that come in without the conjugate and negative bits of the results, and without gaps where
    elements of a result share memory (`unfold`): a copy with its strides would hold one gradient for each place."""
    coerced = collect_metadata_analysis.coerce_tangent_and_suggest_memory_format

    def plain(x: Any) -> Any:
        x = x.resolve_conj().resolve_neg()
        return coerced(x.contiguous() if _may_overlap(x) else x)

    collect_metadata_analysis.coerce_tangent_and_suggest_memory_format = plain
    try:
        yield
    finally:
        collect_metadata_analysis.coerce_tangent_and_suggest_memory_format = coerced


def _may_overlap(x: torch.Tensor) -> bool:
    """Whether elements of a tensor of fixed sizes share memory, other than by an expanded dimension."""
    if x.layout is not torch.strided or x._has_symbolic_sizes_strides:
        return False
    span = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if stride < span:
            return stride != 0
        span += (size - 1) * stride
    return False


@contextmanager
def observed() -> Iterator[None]:
    """Let AOTAutograd keep its entries as for its own cache, in which nothing is looked up.

    Without Inductor's cache PyTorch computes no key (which would import Inductor's code generators) and, in this mode,
    takes a random one.
    """
    settings = {
        "enable_autograd_cache": True,
        "bundled_autograd_cache": True,
        "bypass_autograd_cache_key": True,
        "enable_remote_autograd_cache": False,
        "strict_autograd_cache": False,
        # Both graphs are compiled by then (`GraphPair.partition`).
        "force_non_lazy_backward_lowering": True,
    }
    with config.patch(settings), inductor.patch({"fx_graph_cache": False}):
        yield


def entry_of(compiled: Any) -> tuple[bytes, str | None] | None:
    """AOTAutograd's entry without the compiled graphs, and conditions on sizes; None if it has none."""
    serialize = getattr(compiled, "serialize", None)
    entry = serialize() if serialize is not None else None
    if entry is None:
        return None
    guards = entry.guards_expr
    # `size_guards.py` evaluates the guards; texts of the graphs are for PyTorch's log.
    entry.guards_expr = entry.aot_joint_graph_str = entry.aot_forward_graph_str = entry.aot_backward_graph_str = None
    entry.serialized_bw_module = None
    if any(getattr(wrapper, "needs_post_compile", False) for wrapper in entry.dispatch_wrappers):
        raise CaptureError("its inputs are views of each other, or given twice")
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=5).dump(entry)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise CaptureError(f"{type(error).__name__}: {error}") from error
    return buffer.getvalue(), guards


@dataclass
class Backward:
    """The backward graph, for compiled autograd, which traces it."""

    deserialize: Callable[[], fx.GraphModule]


def wrapped(
    entry: bytes, runs: Mapping[Kind, Boxed], backward: Callable[[], fx.GraphModule] | None
) -> Callable[..., Any]:
    """The callable, with autograd, around compiled graphs. `backward` makes the backward graph as it was traced."""
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.utils import BoxedBool

    loaded: Any = _Unpickler(io.BytesIO(entry), runs).load()
    loaded.serialized_bw_module = None if backward is None else Backward(backward)
    settings = {"cudagraphs": BoxedBool(False), "boxed_forward_device_index": BoxedDeviceIndex(None)}
    boxed = loaded.wrap_post_compile([], loaded.sanitized_aot_config, settings)

    def call(*args: Any) -> Any:
        return boxed(list(args))

    return call


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.kind if isinstance(value, CompiledCode) else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, runs: Mapping[Kind, Boxed]) -> None:
        super().__init__(buffer)
        self.runs = runs

    def persistent_load(self, kind: Kind) -> CompiledCode:
        return CompiledCode(kind, self.runs[kind])
