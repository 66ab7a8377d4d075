"""Calls of PyTorch's attention on a GPU, before autograd: their masks are read, and none is unfused.

    m = (k_places <= q_places) & ones            [B, 1, S, S]
    y = sdpa(q, repeat(k), repeat(v), m)         →   y = sdpa(q, k, v, is_causal=True, enable_gqa=True)

    y = sdpa(q, k, v, (q_places >= 0) & padding) →   y = sdpa(q, k, v, padding)            [B, 1, 1, S]
    y = sdpa(q, k, v, bias.permute(2, 0, 1))     →   y = sdpa(q, k, v, bias.permute(2, 0, 1).contiguous())
    y = sdpa(q.transpose(1, 2).contiguous(), …)  →   y = sdpa(q.transpose(1, 2), …)

PyTorch chooses its kernel where AOTAutograd traces the call, and takes products and a softmax in fp32 ("math") for
what none of its fused kernels accepts: a mask whose last stride is not 1 (an expanded one, a permuted bias) or that
needs a gradient, operands of three axes, rows that do not begin at multiples of 16 bytes. Here such operands become
ones that are accepted; those of five axes, and head sizes that are no multiples of 16 bytes, stay PyTorch's. A mask
that is a band beside something else stays as it is: `fused` reads it in the joint graph.

A call within `sdpa_kernel`, for which the user chose the kernels, stays as it is (`mark_pinned`): Dynamo records the
context manager as two calls that set which kernels may run, and a mark in a node's metadata carries this to the graph
of ATen operators. If the context manager is around the compiled call, PyTorch's switches are set instead.

`nn.MultiheadAttention` returns the mean of its weights by default, which rules out fused kernels; if nobody reads them
they are not computed (`leave_weights_out`). A call with dropout stays, since fused kernels draw other masks, and so
does one in which a query may have no key: unfused it gives NaN, fused zeros.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import fx
from torch.fx import Graph, GraphModule, Node

from tilewright.graph import calls
from tilewright.graph.canonical import argument, canonical_name, example, mutates, same_shape, static, tensor_of
from tilewright.graph.constants import Constants
from tilewright.graph.insert import Writer
from tilewright.hardware.target import Target
from tilewright.passes.attention.acceptable import SdpaCall, accepted, fused_kernel
from tilewright.passes.attention.form import in_old_layout
from tilewright.passes.attention.mask_parts import EVERYWHERE, Band, MaskParts, read_mask
from tilewright.passes.attention.spelling import unrepeated
from tilewright.passes.rule import call, rule, undecided
from tilewright.records.errors import Refusal
from tilewright.records.program import Decision

SDPA = "scaled_dot_product_attention"
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
CHECKPOINTS = frozenset({"tag_activation_checkpoint", "wrap_activation_checkpoint"})
"""Calls of a graph that stands in the module: it, then its inputs."""
NOTHING = (None, None, None, None, 0.0, False, None, False)


def prepare_calls(graph: Graph, target: Target, given: dict[Node, torch.Tensor] | None = None) -> list[Decision]:
    """Rewrite the calls in `graph`, a torch-level graph from Dynamo, in place; a decision for each that was changed, or
    that no fused kernel of PyTorch takes. Bodies of activation checkpoints are graphs of their own in it, some of whose
    inputs are `given`."""
    nodes = [node for node in graph.nodes if _is_call(node, target)]
    bodies = [node for node in graph.nodes if canonical_name(node) in CHECKPOINTS]
    if not nodes and not bodies:
        return []
    constants = Constants(graph, given or {})
    decisions = [decision for node in nodes if (decision := _decide(node, constants, target)) is not None]
    for node in bodies:
        name, operands = node.args[0], node.args[1:]
        is_held = isinstance(name, Node) and name.op == "get_attr"
        body = getattr(graph.owning_module, str(name.target), None) if is_held else None
        if isinstance(body, GraphModule) and isinstance(name, Node) and len(name.users) == 1:
            inputs = body.graph.find_nodes(op="placeholder")
            pairs = zip(inputs, operands, strict=False)
            known = {x: constants.value(operand) for x, operand in pairs if isinstance(operand, Node)}
            decisions += prepare_calls(body.graph, target, {x: y for x, y in known.items() if y is not None})
            body.recompile()
    return decisions


def _is_call(node: Node, target: Target) -> bool:
    value = example(node)
    found = node.op == "call_function" and canonical_name(node) == SDPA
    return found and value is not None and target.runs_on_gpu(value.device) and not is_pinned(node)


def _decide(node: Node, constants: Constants, target: Target) -> Decision | None:
    """Rewrite one call."""
    here = undecided(node, "sdpa")
    try:
        call = _read(node)
        write = Writer(node.graph, node)
        changes, call = _masked(write, call, constants)
        uncopied = call._replace(q=_uncopied(call.q, node), k=_uncopied(call.k, node), v=_uncopied(call.v, node))
        if uncopied != call:
            changes, call = [*changes, "its operands are read in place, without copies"], uncopied
        call = _in_one_dtype(write, call, changes)
        grouped = _grouped(write, call)
        if grouped is not None:
            changes, call = [*changes, "heads that share keys read these once"], grouped
        changed, new = accepted(write, call, target)
        changes += changed
        if not changes:
            return None
        if new is None:
            new = call.write(write)
        new = in_old_layout(write, node, new)
        node.replace_all_uses_with(new)
        node.graph.erase_node(node)
    except Refusal as refusal:
        return replace(here, reason=str(refusal))
    return replace(here, consumer=new.name, verdict="taken", reason="; ".join(changes))


def _read(node: Node) -> SdpaCall:
    named = {
        name: argument(node, i, name, default) for i, (name, default) in enumerate(zip(NAMES, NOTHING, strict=True))
    }
    q, k, v, mask, dropout, causal, scale, grouped = named.values()
    numbers = isinstance(dropout, (int, float, Node)) and isinstance(scale, (int, float, type(None), Node))
    if not numbers or not isinstance(causal, bool) or not isinstance(grouped, bool):
        raise Refusal("an option that differs from call to call")
    for x in (q, k, v):
        tensor_of(x)
    if mask is not None and example(mask) is None:
        raise Refusal("a mask of unknown shape")
    return SdpaCall(q, k, v, mask, dropout, causal, scale, grouped, tensor_of(node).dtype)


def _masked(write: Writer, call: SdpaCall, constants: Constants) -> tuple[list[str], SdpaCall]:
    """The call with what its mask amounts to, and what that is; as it was where nothing simpler says the same."""
    queries, keys = tensor_of(call.q).shape[-2], tensor_of(call.k).shape[-2]
    if call.mask is None or call.causal or any(isinstance(size, int) and size == 0 for size in (queries, keys)):
        return [], call
    found = read_mask(call.mask, constants, queries, keys)
    band = found.band(queries, keys)
    if not found.conditions and not found.biases:
        if band == EVERYWHERE:
            return ["its mask hides nothing"], call._replace(mask=None)
        if band == Band(None, 0) and same_shape((queries,), (keys,)):
            return ["its mask is causal: the kernel needs no mask tensor"], call._replace(mask=None, causal=True)
        return [], call
    if not found.shows_all or (found.conditions and found.biases) or len(found.biases) > 1:
        return [], call
    return _smaller(write, call, found)


def _in_one_dtype(write: Writer, call: SdpaCall, changes: list[str]) -> SdpaCall:
    """The call with an added mask in the dtype of q: PyTorch's fused kernels read its memory as of that dtype.

    cuDNN takes the bytes of an fp32 mask for bf16 (PyTorch's pull request 191612).
    """
    mask = example(call.mask)
    if call.mask is None or mask is None or mask.dtype in (torch.bool, call.dtype) or mask.dtype == torch.float64:
        return call
    if tensor_of(call.q).dtype != call.dtype:
        return call  # autocast casts
    changes.append(f"the mask in {call.dtype}".replace("torch.", ""))
    return call._replace(mask=write.method("to", call.mask, call.dtype))


def _smaller(write: Writer, call: SdpaCall, found: MaskParts) -> tuple[list[str], SdpaCall]:
    """The call with a mask of fewer elements in memory, where what hides or is added has fewer."""
    assert call.mask is not None
    parts, before = found.conditions or found.biases, tensor_of(call.mask)
    if parts == (call.mask,):
        return [], call
    if len(parts) > 1:
        shapes = [tensor_of(part).shape for part in parts]
        if not all(map(static, (before.shape, *shapes))) or torch.broadcast_shapes(*shapes).numel() >= _stored(before):
            return [], call
    mask = write.joined(torch.logical_and, parts)
    # A mask that only hides is bool, even if the program converted it to 0 and -inf.
    dtype = torch.bool if found.conditions else before.dtype
    mask = write.cast(mask, dtype)
    changes = "its mask is read without its expansion"
    if static(before.shape):
        changes = f"a mask of {_stored(tensor_of(mask))} elements in place of {before.numel()}"
    return [changes], call._replace(mask=mask)


def _stored(value: torch.Tensor) -> int:
    """Elements that `value` has in memory."""
    return prod(int(size) for size, stride in zip(value.shape, value.stride(), strict=True) if stride != 0)


def _uncopied(node: Node, call: Node) -> Node:
    """x of `x.contiguous()`, where the kernels take rows as they lie in x and nothing is written to in between."""
    source = node.args[0] if canonical_name(node) == "contiguous" and node.args else None
    x = example(source)
    if not isinstance(source, Node) or x is None or x.dtype != tensor_of(node).dtype or x.stride(-1) != 1:
        return node
    if not all(_is_aligned(place, x.itemsize) for place in (*x.stride()[:-1], x.storage_offset())):
        return node
    between = node
    while between is not call:
        between = between.next
        if mutates(between):
            return node
    return _uncopied(source, call)


def _is_aligned(elements: int | torch.SymInt, itemsize: int) -> bool:
    """Whether so many elements are a multiple of 16 bytes, whatever value a symbol has."""
    if isinstance(elements, int):
        return elements * itemsize % 16 == 0
    return bool((elements.node.expr * itemsize / 16).is_integer)


def _grouped(write: Writer, call: SdpaCall) -> SdpaCall | None:
    """The call on keys and values before they were repeated for each head, if a fused kernel takes that."""
    if call.grouped or tensor_of(call.q).dim() != 4:
        return None
    k, v = unrepeated(call.k), unrepeated(call.v)
    if k is call.k or v is call.v or not same_shape(tensor_of(k).shape[:2], tensor_of(v).shape[:2]):
        return None
    grouped = call._replace(k=k, v=v, grouped=True)
    return grouped if fused_kernel(write, grouped) is not None else None


PINNED = "tilewright_pinned"
ALL = frozenset({"FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"})
"""The kernels among which PyTorch chooses by default."""


def mark_pinned(graph: fx.Graph, target: Target) -> None:
    """Mark the nodes of `module`, a torch-level graph from Dynamo, that run while some kernels are disabled."""
    pinned = False
    for node in graph.nodes:
        if getattr(node.target, "__name__", "") == "_sdpa_kernel":
            # Calls of `_backend_from_string`, whose arguments are names.
            backends: list[fx.Node] = []
            fx.map_arg(node.args[0], backends.append)
            pinned = not {backend.args[0] for backend in backends if backend.args} >= ALL
        elif pinned:
            calls.mark(node, PINNED)


def is_pinned(node: fx.Node) -> bool:
    """Whether the user chose the kernels of this ATen operator, or has disabled some of PyTorch's kernels."""
    kernels = "flash", "mem_efficient", "cudnn", "math"
    enabled = (getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")() for kernel in kernels)
    return calls.is_marked(node, PINNED) or not all(enabled)


DROPOUT = 10
"""Position of the dropout probability."""
BY_NAME = 13
"""Positional arguments of PyTorch's modules; the others (training, masks, need_weights) are given by name."""


@rule(
    call("multi_head_attention_forward", ...),
    where=lambda node: len(node.args) <= BY_NAME and node.kwargs.get("need_weights", True),
    reason="weights that nobody reads are not computed",
    refused="its weights are computed: ",
    by="attention",
)
def leave_weights_out(node: Node, target: Target) -> Node:
    if not target.runs_on_gpu(tensor_of(argument(node, 0, "query")).device):
        raise Refusal("PyTorch's fused attention on a CPU gives zeros where they are NaN")
    if any(canonical_name(user) != "getitem" or (user.args[1] != 0 and user.users) for user in node.users):
        raise Refusal("the program reads them")
    if argument(node, DROPOUT, "dropout_p", 0.0) != 0.0 and node.kwargs.get("training", True):
        raise Refusal("dropout, whose mask must be the one that eager draws")
    mask = node.kwargs.get("attn_mask")
    leaves_keys = mask is None or (isinstance(mask, Node) and _leaves_keys(mask, Constants(node.graph)))
    if node.kwargs.get("key_padding_mask") is not None or not leaves_keys:
        raise Refusal("a mask that may leave a query no key, which gives NaN")
    node.update_kwarg("need_weights", False)
    # With weights the flag is a hint beside the mask; without weights it would replace the mask.
    node.update_kwarg("is_causal", False)
    return node


def _leaves_keys(mask: Node, constants: Constants) -> bool:
    """Whether a mask [Sq, Sk] or [B·H, Sq, Sk] leaves every query a key."""
    value = example(mask)
    if value is None or value.dim() < 2:
        return False
    found = read_mask(mask, constants, *value.shape[-2:])
    return not found.conditions and not found.biases and found.leaves_a_key(*value.shape[-2:])
