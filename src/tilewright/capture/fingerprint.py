"""Describes as text everything that determines how a captured program is traced: equal texts give equal plans.

`fingerprint` describes the graph that Dynamo captured (every call and constant), its inputs (layout, offset, leaf or
view, `requires_grad`), and the modes and settings that PyTorch traces under. It refuses, with the reason, what it
cannot describe exactly; each process traces such a program again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from tilewright.capture.size_guards import Symbols
from tilewright.graph.specialise import has_symbols
from tilewright.pytorch.state import (
    compiled_autograd_is_on,
    cudnn_takes_tf32,
    float32_precision,
    functions_watched,
    has_forward_level,
)
from tilewright.records.errors import CaptureError

OPERATORS = ("aten", "prims", "prim", "tilewright")
"""Namespaces whose operators the versions of PyTorch and tilewright describe."""
MODULES = ("torch", "_operator", "operator", "math", "builtins")
"""Top modules of functions for which the same holds."""
_PLAIN = (bool, int, float, complex, str, type(None), type(Ellipsis), range)
_NAMED = (torch.dtype, torch.layout, torch.memory_format)


class Undescribed(CaptureError):
    """Something of a program cannot be described exactly."""


def fingerprint(module: fx.GraphModule, inputs: Sequence[Any]) -> list[str]:
    """The description of a captured module that is called with `inputs`. Raises Undescribed with the reason."""
    _refuse_surroundings(module)
    return [*_surroundings(), *_inputs(module, inputs), *map(_call, module.graph.nodes)]


def _refuse_surroundings(module: fx.GraphModule) -> None:
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fakify_first_call:
        raise Undescribed("the graph is a bucket of DDP, whose results are faked first")
    if compiled_autograd_is_on():
        raise Undescribed("autograd is traced")
    if hasattr(module, "saved_tensors_hooks_pack_0"):
        raise Undescribed("hooks for saved tensors are traced with it")
    if has_forward_level() or functions_watched() or torch._C._functorch.peek_interpreter_stack() is not None:
        raise Undescribed("a transform or a mode is active")
    if [*module.parameters(), *module.buffers()]:
        raise Undescribed("the graph holds parameters of its own")


def _surroundings() -> Iterator[str]:
    """Modes and settings that PyTorch traces under, or that passes ask for."""
    yield f"gradients {torch.is_grad_enabled()} inference {torch.is_inference_mode_enabled()}"
    for kind in torch._C._autocast_supported_devices():
        if torch.is_autocast_enabled(kind):
            yield f"autocast {kind} {torch.get_autocast_dtype(kind)} {torch.is_autocast_cache_enabled()}"
    yield f"deterministic {torch.are_deterministic_algorithms_enabled()}"
    yield f"warns {torch.is_deterministic_algorithms_warn_only_enabled()}"
    yield f"defaults {torch.get_default_dtype()} {_device(torch.get_default_device())} {torch.get_num_threads()}"
    yield f"precision {float32_precision()}"
    matmul, cudnn, cuda = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.cuda
    reduced = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    yield f"matmul {reduced} {matmul.allow_fp16_accumulation}"
    yield f"cudnn {cudnn.enabled} {cudnn.benchmark} {cudnn.deterministic} {cudnn_takes_tf32()}"
    yield f"mkldnn {torch.backends.mkldnn.enabled}"
    enabled = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    yield f"attention {enabled} {cuda.cudnn_sdp_enabled()}"
    # How AOTAutograd traces: its whole configuration.
    yield repr(sorted(torch._functorch.config.get_serializable_config_copy().items(), key=lambda item: item[0]))


def _inputs(module: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[str]:
    symbols = Symbols(inputs)
    memory: set[int] = set()
    placeholders = module.graph.find_nodes(op="placeholder")
    for place, (x, node) in enumerate(zip(inputs, placeholders, strict=True)):
        if not isinstance(x, torch.Tensor):
            yield f"size {symbols.text(x)}" if isinstance(x, torch.SymInt) else _argument(x)
            continue
        # Inputs may be the call's own tensors; Dynamo's fake ones have the symbols.
        fake = node.meta.get("example_value")
        yield _tensor(place, x, fake if has_symbols(fake) else x, symbols)
        storage = x.untyped_storage()._cdata
        if storage in memory:
            raise Undescribed(f"input {place} shares memory with another")
        memory.add(storage)


def _tensor(place: int, x: torch.Tensor, sized: torch.Tensor, symbols: Symbols) -> str:
    """An input, whose sizes are those of `sized`."""
    from torch._subclasses.fake_tensor import FakeTensor

    if type(x) not in (torch.Tensor, torch.nn.Parameter, FakeTensor):
        raise Undescribed(f"input {place} is a {type(x).__name__}")
    if x.layout is not torch.strided:
        raise Undescribed(f"input {place} has no strides")
    if x.is_conj() or x.is_neg() or x.is_quantized or x.is_inference():
        raise Undescribed(f"input {place} is conjugated, negated, quantised or made in inference mode")
    shape = [list(map(symbols.text, sizes)) for sizes in (sized.shape, sized.stride(), [sized.storage_offset()])]
    how = isinstance(x, torch.nn.Parameter), x.requires_grad, x.is_leaf, x._is_view()
    return f"{shape} {x.dtype} {_device(x.device)} {how}"


def _device(device: torch.device) -> str:
    """A device's type, and its index unless it is the current device, whose index differs between ranks."""
    is_here = device.type == "cuda" and device.index == torch.cuda.current_device()
    return "cuda here" if is_here else str(device)


def _call(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"{node.op} {node.name} {_graph_of_a_function(node)}"
    if node.op in ("placeholder", "output") or (node.op == "call_method" and _is_tensor(node.args[0])):
        target = str(node.target)
    elif node.op == "call_function":
        target = _function(node.target)
    else:
        raise Undescribed(f"{node.name} is a {node.op} of {node.target}")
    if "custom" in node.meta:
        raise Undescribed(f"{node.name} is annotated")
    static = (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")
    return f"{node.op} {node.name} {target} {_argument(node.args)} {_argument(node.kwargs)} {static}"


def _graph_of_a_function(node: fx.Node) -> str:
    """Forward or backward of a `torch.autograd.Function`, which Dynamo has traced to a graph of its own."""
    held = getattr(node.graph.owning_module, str(node.target), None)
    if not isinstance(held, fx.GraphModule):
        raise Undescribed(f"{node.name} is a {type(held).__name__}")
    return "{" + "; ".join(map(_call, held.graph.nodes)) + "}"


def _is_tensor(x: object) -> bool:
    return isinstance(x, fx.Node) and isinstance(x.meta.get("example_value"), torch.Tensor)


def _argument(x: Any) -> str:
    """A unique text for a constant or a node."""
    kind = type(x)
    if isinstance(x, fx.Node):
        return f"%{x.name}"
    if isinstance(x, (tuple, list)):
        return f"{kind.__name__}({', '.join(map(_argument, x))})"
    if isinstance(x, dict):
        return f"{{{', '.join(f'{_argument(key)}: {_argument(value)}' for key, value in x.items())}}}"
    if isinstance(x, slice):
        return f"slice({_argument(x.start)}, {_argument(x.stop)}, {_argument(x.step)})"
    if kind is torch.device:
        return _device(x)
    if kind in _PLAIN or kind in _NAMED:
        return f"{kind.__name__} {x!r}"
    raise Undescribed(f"an argument is a {kind.__name__}")


def _function(target: Any) -> str:
    if target is torch.ops.higher_order.autograd_function_apply:
        return str(target)
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        name = str(target if isinstance(target, OpOverload) else target._qualified_op_name)
        if name.replace("::", ".").split(".")[0] not in OPERATORS:
            raise Undescribed(f"{name} may be another function in another process")
        return name
    name = getattr(target, "__name__", "")
    home = getattr(target, "__module__", None) or "torch"
    for place in (home, "torch", "torch._C._nn", "torch.nn.functional", "torch._C"):
        if place.split(".")[0] in MODULES and _found(place, name) is target:
            return f"{place}.{name}"
    raise Undescribed(f"{home}.{name} may be another function in another process")


def _found(place: str, name: str) -> Callable[..., Any] | None:
    module = sys.modules.get(place)
    if module is None and place != "torch._C._nn":
        try:
            module = importlib.import_module(place)
        except ImportError:
            return None
    found: Callable[..., Any] | None = getattr(module or torch._C._nn, name, None)
    return found
